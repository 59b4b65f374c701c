"""What a definition in upstream's source looks like: the part that callers see, and a hash of all of it.

Both are read from source text, so that a source archive can be examined as well as what is loaded.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DefinitionError(ValueError):
    """There is no source, or no such definition in it."""


@dataclass(frozen=True)
class Definition:
    """``signature``: parameters with their defaults, without annotations; of a class those of its ``__init__``.

    ``fingerprint``: the first 16 digits of the SHA-256 of the source without indentation, blank lines and lines that
    are comments.
    """

    signature: str
    fingerprint: str


def definition_of(target: Any) -> Definition:
    """Of a loaded class or function. Raises DefinitionError if its source is not known."""
    try:
        # The code itself: a function's __wrapped__, which inspect would follow, need not be what runs.
        source = inspect.getsource(getattr(target, "__code__", target))
    except (OSError, TypeError) as error:
        raise DefinitionError(f"its source cannot be read: {error}") from error
    tree = ast.parse(textwrap.dedent(source))
    return _describe(tree.body[0], source)


def definition_in(root: Path, target: str) -> Definition:
    """Of ``package.module:Qualified.name`` in a source tree. A name that a module imports from another is followed."""
    module, _, path = target.partition(":")
    file = root.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    try:
        source = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DefinitionError(f"{target}: there is no module {module} in {root}") from error
    body: list[ast.stmt] = ast.parse(source).body
    *parents, name = path.split(".")
    for parent in parents:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == parent), [])
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _describe(node, _lines_of(node, source))
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module and (name in names or "*" in names):
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            home = f"{package}.{node.module}" if node.level else node.module
            try:
                return definition_in(root, f"{home}:{name}")
            except DefinitionError:
                if name in names:
                    raise
    raise DefinitionError(f"{target} is missing in {root}")


def _lines_of(node: ast.ClassDef | ast.FunctionDef, source: str) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _describe(node: ast.stmt, source: str) -> Definition:
    lines = [line.rstrip() for line in textwrap.dedent(source).splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    digest = hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
    return Definition(_signature(node), digest)


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        found = [entry for entry in node.body if isinstance(entry, ast.FunctionDef) and entry.name == "__init__"]
        return _signature(found[0]) if found else "(inherited)"
    if not isinstance(node, ast.FunctionDef):
        raise DefinitionError(f"it is no class or function, but {ast.unparse(node).splitlines()[0]!r}")
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(arguments)})"
