"""Damages checkpoints: ``python -m tests.crash.damage --count 1000 --seed 1``.

One byte of a random file is changed, or its end cut off: verifying must name the file and, where there is one, the
expert; loading must take the newest checkpoint that does not need the file.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from megatron_lazarus.checkpoint.engine import FullSaves
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.manifest import Manifest, read_latest
from tests.crash.job import Ranks, check_content, newest

STEPS = 6


def prepare(save_dir: str) -> list[str]:
    """Tags of partial checkpoints, the newest first."""
    ranks = Ranks(FullSaves(persist_experts=1))
    for step in range(1, STEPS + 1):
        published, reason = ranks.save(save_dir, step)
        assert published, reason
    ranks.close()
    return [f"global_step{step}" for step in range(STEPS, 0, -1)]


def needed(save_dir: str, tag: str) -> dict[Path, str]:
    """The files of a checkpoint and what each holds."""
    manifest = Manifest.read(str(Path(save_dir, tag)))
    files = {Path(save_dir, tag, "manifest.json"): ""}
    files.update({Path(save_dir, at, entry.name): what for at, entry, what in manifest.all_files()})
    return files


def strike(path: Path, source: random.Random) -> str:
    """Damage a file; returns how."""
    data = bytearray(path.read_bytes())
    position = source.randrange(len(data))
    if source.random() < 0.25:
        path.write_bytes(data[:position])
        return "truncation"
    data[position] ^= source.randrange(1, 256)
    path.write_bytes(data)
    return "flip"


def examine(save_dir: str, count: int, seed: int) -> Counter[str]:
    """Damage, check, repair, ``count`` times; returns how often what happened."""
    source = random.Random(seed)
    order = prepare(save_dir)
    files = {tag: needed(save_dir, tag) for tag in order}
    every = sorted({path for held in files.values() for path in held})
    manifests = [path for path in every if path.name == "manifest.json"]
    done: Counter[str] = Counter()
    for _ in range(count):
        # Manifests are few, and everything hangs on them.
        path = source.choice(manifests if source.random() < 0.2 else every)
        content = path.read_bytes()
        done[strike(path, source)] += 1
        whole = [tag for tag in order if path not in files[tag]]
        for tag in order:
            damage = _damage(save_dir, tag)
            if tag in whole:
                assert damage is None, damage
            else:
                assert damage is not None, f"{path} is damaged, and {tag} passes"
                assert str(path) in damage, f"{path} is damaged, and told is: {damage}"
                assert files[tag][path] in damage, f"{damage}: it does not say that it holds {files[tag][path]}"
        chosen = None
        with contextlib.suppress(CheckpointError):
            chosen = newest(save_dir)
        if chosen is None:
            assert not whole, f"nothing is loaded, but {whole} are whole"
            done["nothing undamaged left"] += 1
        else:
            tag, manifest = chosen
            assert tag == whole[0], f"{tag} is loaded; whole are {whole}"
            check_content(save_dir, manifest)
            done["fell back" if tag != order[0] else "not needed by the newest"] += 1
        path.write_bytes(content)
    assert read_latest(save_dir) == order[0]
    return done


def _damage(save_dir: str, tag: str) -> str | None:
    folder = str(Path(save_dir, tag))
    try:
        Manifest.read(folder).verify(folder)
    except CheckpointError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="files to damage (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    folder = tempfile.mkdtemp(prefix="lazarus-damage-")
    try:
        done = examine(folder, arguments.count, arguments.seed)
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.count} files damaged, all detected and named: {dict(done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
