"""Rules of the repository that no checker knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_lazarus"
MAX_LINES = 400
# Part of it is built, so that this file does not name what it looks for.
HOME_DIRECTORIES = re.compile(
    r"(?<![\w.~-])/(?:" + "|".join(["ho" + "me/", "ro" + "ot/", "wo" + "rk/", "Us" + "ers/"]) + ")"
)


def tracked_files() -> list[Path]:
    """What git knows; without a repository (a source archive) the test that needs it is skipped."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if result.returncode:
        pytest.skip("not a git repository")
    return [ROOT / name for name in result.stdout.decode().split("\0") if name]


def imported_modules(file: Path) -> Iterator[str]:
    """Absolute names of what a file of the package imports, anywhere in it."""
    parent = file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parent[: len(parent) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            yield module
            # `from megatron_lazarus import moe` names the folder only here.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden_imports(folder: str, others: tuple[str, ...]) -> list[str]:
    prefixes = tuple(f"megatron_lazarus.{other}" for other in others)
    return [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted((PACKAGE / folder).rglob("*.py"))
        for module in imported_modules(file)
        if any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)
    ]


def test_planning_stands_alone() -> None:
    others = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")} - {"planning", "__init__"}
    assert forbidden_imports("planning", (*sorted(others), "patches")) == []
    outside = {"torch", "deepspeed", "megatron"}
    files = sorted((PACKAGE / "planning").rglob("*.py"))
    assert [file.name for file in files if outside & {name.split(".")[0] for name in imported_modules(file)}] == []


@pytest.mark.parametrize("folder", ["moe", "elastic", "checkpoint"])
def test_parts_do_not_import_each_other(folder: str) -> None:
    others = tuple(other for other in ("moe", "elastic", "checkpoint", "engine") if other != folder)
    assert forbidden_imports(folder, others) == []


def test_apex_is_no_requirement() -> None:
    called = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)]
    (setup,) = (node for node in called if getattr(node.func, "id", "") == "setup")
    requirements = {keyword.arg: keyword.value for keyword in setup.keywords}
    listed = [
        ast.literal_eval(requirements["install_requires"]),
        *ast.literal_eval(requirements["extras_require"]).values(),
    ]
    assert [line for lines in listed for line in lines if line.lower().startswith("apex")] == []
    unguarded = [
        str(file.relative_to(ROOT))
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "apex" in ast.unparse(node).replace(".", " ").split()
    ]
    assert unguarded == []


def test_importing_the_package_is_cheap() -> None:
    """The launcher starts once per rank and only starts others: it must not load torch."""
    code = "import sys, megatron_lazarus; print(*{'torch', 'deepspeed', 'megatron', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == []


def test_no_paths_of_a_developers_machine() -> None:
    found = []
    for file in tracked_files():
        if not file.is_file():
            continue
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{file.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if HOME_DIRECTORIES.search(line)]
    assert found == []


def test_files_stay_short() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in PACKAGE.rglob("*.py")}
    long = {str(file.relative_to(ROOT)): length for file, length in lengths.items() if length > MAX_LINES}
    assert long == {}, f"files of more than {MAX_LINES} lines do more than one thing"
