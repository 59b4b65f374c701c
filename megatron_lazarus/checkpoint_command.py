"""``lazarus checkpoint``: look at checkpoints, check them, delete old ones, take them to ``deepspeed.moe`` and back."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lazarus.checkpoint.files import CheckpointError, check_file
from megatron_lazarus.checkpoint.ledger import Ledger
from megatron_lazarus.checkpoint.manifest import Manifest, chosen_tag, read_latest, tags
from megatron_lazarus.checkpoint.owner import Owner
from megatron_lazarus.checkpoint.retention import complete_tags, prune, superseded

if TYPE_CHECKING:
    from megatron_lazarus.checkpoint.optimizer_state import Rule

HELP = "list, inspect, verify, prune, export and import checkpoints"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``checkpoint`` subcommand and its own."""
    parser = subparsers.add_parser("checkpoint", help=HELP, description=__doc__)
    commands = parser.add_subparsers(dest="checkpoint_command", required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("directory", type=Path, help="what was given to save_checkpoint")
        one.set_defaults(run=lambda arguments: _run(name, run, arguments))
        return one

    one = command("ls", _ls, "list the checkpoints of a directory, the newest first")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    one = command("inspect", _inspect, "show what a checkpoint holds and how old each expert in it is")
    one.add_argument("--tag", help="default: the latest")
    one.add_argument("--json", action="store_true", help="print JSON instead of tables")
    one = command("verify", _verify, "read every file of a checkpoint and compare its checksum")
    one.add_argument("--tag", help="default: the latest")
    one.add_argument("--all", action="store_true", help="all checkpoints of the directory")
    one = command("prune", _prune, "delete old checkpoints; files that a kept one needs stay")
    one.add_argument("--keep", type=int, required=True, metavar="N", help="complete checkpoints to keep, at least 1")
    one.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    one = command("export", _export, "write a checkpoint as deepspeed.moe loads it (ZeRO stage 0)")
    one.add_argument("target", type=Path, help="a directory for DeepSpeed's load_checkpoint")
    one.add_argument("--ep-size", type=int, required=True, metavar="N", help="ep_size of the run that will load it")
    one.add_argument("--world-size", type=int, metavar="N", help="ranks of that run (default: ep-size)")
    one.add_argument(
        "--optimizer-groups",
        choices=("split", "together"),
        help="split: experts in groups of their own, as with an optimizer from the JSON or after "
        "split_params_into_different_moe_groups_for_optimizer; together: as in the script's own groups (default: as in "
        "the script that wrote the checkpoint)",
    )
    _add_conversion(one)
    one = command("import", _import, "take over a checkpoint of deepspeed.moe (optimizer state: from ZeRO stage 0)")
    one.add_argument("target", type=Path, help="a directory for this package's load_checkpoint")
    _add_conversion(one)


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", help="default: the latest")
    parser.add_argument(
        "--parameter-groups",
        nargs="+",
        metavar="REGEX",
        help="one pattern of parameter names for each group that the script gives its optimizer, the first that "
        "matches counts; needed unless there is one group, or biases and norms have their own",
    )


def _run(name: str, run: Any, arguments: argparse.Namespace) -> int:
    """Status 0: done; 1: what was looked at is damaged; 2: it could not be done, and the reason on standard error."""
    try:
        return int(run(arguments))
    except (CheckpointError, OSError, ValueError) as error:
        print(f"lazarus checkpoint {name}: {error}", file=sys.stderr)
        return 2


# -- what there is --------------------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    directory = _existing(arguments.directory)
    latest = read_latest(directory)
    rows = [_summary(directory, tag, latest) for tag in tags(directory)]
    if arguments.json:
        print(json.dumps(rows))
        return 0
    if not rows:
        print(f"no checkpoint in {directory}")
        return 0
    table: list[tuple[str, ...]] = [("tag", "step", "content", "written", "needed", "experts written", "")]
    for row in rows:
        if row["error"]:
            table.append((row["tag"], "", "", "", "", "", row["error"]))
            continue
        experts = f"{row['experts_written']} of {row['experts']}"
        sizes = (_size(row["bytes_written"]), _size(row["bytes_needed"]))
        note = "latest" if row["latest"] else ""
        table.append((row["tag"], str(row["step"]), row["content"], *sizes, experts, note))
    _print_table(table)
    return 0


def _summary(directory: str, tag: str, latest: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"tag": tag, "latest": tag == latest, "error": None}
    try:
        manifest = Manifest.read(os.path.join(directory, tag))
    except CheckpointError as error:
        return {**row, "error": str(error)}
    entries = list(manifest.all_files())
    fresh = [entry for entry in manifest.experts if all(part.tag == tag for part in entry.parts)]
    return {
        **row,
        "step": manifest.global_steps,
        "generation": manifest.generation,
        "content": manifest.content,
        "bytes_written": sum(entry.bytes for owner, entry, _ in entries if owner == tag),
        "bytes_needed": sum(entry.bytes for _, entry, _ in entries),
        "experts_written": len(fresh),
        "experts": len(manifest.experts),
    }


def _inspect(arguments: argparse.Namespace) -> int:
    directory = _existing(arguments.directory)
    tag = chosen_tag(directory, arguments.tag)
    manifest = Manifest.read(os.path.join(directory, tag))
    summary = _summary(directory, tag, read_latest(directory))
    ages: dict[int, dict[int, int]] = {}
    for entry in manifest.experts:
        ages.setdefault(entry.layer, {})[entry.expert] = manifest.global_steps - min(part.step for part in entry.parts)
    needed = sorted({owner for owner, _, _ in manifest.all_files()} - {tag})
    if arguments.json:
        print(json.dumps({**summary, "needs": needed, "steps_behind": ages, "ledger": manifest.ledger}))
        return 0
    parameters = sum(_numel(shape) for shape in manifest.model["dense"].values())
    print(f"{tag}: step {manifest.global_steps}, generation {manifest.generation}, content {manifest.content!r}")
    print(f"dense part: {parameters} parameters, {_size(sum(entry.bytes for entry in manifest.files))}")
    for index, layer in enumerate(manifest.model["moe_layers"]):
        each = sum(_numel(shape) for shape in layer["tensors"].values())
        print(f"MoE layer {index}: {layer['num_experts']} experts of {each} parameters")
    print(f"written: {_size(summary['bytes_written'])} of {_size(summary['bytes_needed'])} that a load reads")
    print(f"needs files of: {', '.join(needed) or 'no other checkpoint'}")
    print("steps that the oldest part of each expert is behind:")
    for layer_index in sorted(ages):
        row = ages[layer_index]
        print(f"  layer {layer_index}: {' '.join(str(row[expert]) for expert in sorted(row))}")
    if "assigned" in manifest.ledger:
        ledger = Ledger([layer["num_experts"] for layer in manifest.model["moe_layers"]])
        ledger.restore(manifest.ledger)
        ledger.planned_steps = manifest.ledger.get("planned_steps")
        unsaved = [float(tokens.sum()) for tokens in ledger.unsaved()]
        run = "the run so far" if ledger.planned_steps is None else f"the planned {ledger.planned_steps} steps"
        print(f"lost token updates of experts: {ledger.lost().sum():.0f}, PLT {ledger.plt():.2%} of {run}")
        print(f"a load of this checkpoint loses {sum(unsaved):.0f} more, {ledger.fraction(unsaved):.2%}")
    return 0


# -- checking and deleting ------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    directory = _existing(arguments.directory)
    if arguments.all and arguments.tag:
        raise ValueError("--all and --tag exclude each other")
    chosen = tags(directory) if arguments.all else [chosen_tag(directory, arguments.tag)]
    if not chosen:
        raise CheckpointError(f"no checkpoint in {directory}")
    damaged = 0
    checked: dict[str, str | None] = {}
    for tag in chosen:
        problems = _problems(directory, tag, checked)
        damaged += bool(problems)
        print(f"{tag}: {'damaged' if problems else 'complete'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def _problems(directory: str, tag: str, checked: dict[str, str | None]) -> list[str]:
    """What is wrong with a tag; ``checked`` remembers files that several tags name."""
    try:
        manifest = Manifest.read(os.path.join(directory, tag))
    except CheckpointError as error:
        return [str(error)]
    problems = []
    entries = list(manifest.all_files())
    with _progress(f"verify {tag}", sum(entry.bytes for _, entry, _ in entries), "B") as advance:
        for owner, entry, what in entries:
            path = os.path.join(directory, owner, entry.name)
            if path not in checked:
                checked[path] = None
                try:
                    check_file(path, entry.bytes, entry.sha256, what)
                except CheckpointError as error:
                    checked[path] = str(error)
            if (problem := checked[path]) is not None:
                problems.append(problem)
            advance(entry.bytes)
    return problems


def _prune(arguments: argparse.Namespace) -> int:
    if arguments.keep < 1:
        raise ValueError(f"--keep is {arguments.keep}; it must be at least 1")
    directory = _existing(arguments.directory)
    newest, manifests = chosen_tag(directory, None), complete_tags(directory)
    if newest not in manifests:
        raise CheckpointError(f"the latest checkpoint, {newest}, is not complete: nothing is deleted")
    if arguments.dry_run:
        for tag in superseded(manifests, newest, arguments.keep):
            print(f"would retire {tag}")
        return 0
    owner = Owner(directory, f"lazarus-checkpoint-prune-{os.getpid()}")
    owner.claim()
    try:
        before = _bytes_in(directory)
        # The owner has no save in progress: what is incomplete there was left by jobs that are gone.
        retired = prune(directory, arguments.keep, newest, active=(), preparing=threading.Lock())
        freed = before - _bytes_in(directory)
    finally:
        owner.release()
    for tag in retired:
        kept = "; files that others need stay" if os.path.isdir(os.path.join(directory, tag)) else ""
        print(f"retired {tag}{kept}")
    print(f"freed {_size(freed)}")
    if damaged := [tag for tag in tags(directory) if tag not in complete_tags(directory)]:
        print(f"{', '.join(damaged)}: damaged, so what it needs is unknown and no file was deleted; remove it first")
        return 1
    return 0


def _bytes_in(directory: str) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)


# -- to deepspeed.moe and back --------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    from megatron_lazarus.checkpoint.deepspeed_layout import export_checkpoint

    source = _existing(arguments.directory)
    with _experts("export") as progress:
        manifest = export_checkpoint(
            source,
            str(arguments.target),
            arguments.ep_size,
            arguments.tag,
            world_size=arguments.world_size,
            split={"split": True, "together": False}.get(arguments.optimizer_groups),
            progress=progress,
            **_rules(arguments),
        )
    print(f"{os.path.join(arguments.target, manifest.tag)}: step {manifest.global_steps}, ep_size {arguments.ep_size}")
    behind = sum(any(part.step < manifest.global_steps for part in entry.parts) for entry in manifest.experts)
    if behind:
        print(f"{behind} of {len(manifest.experts)} experts are of earlier steps: see lazarus checkpoint inspect")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from megatron_lazarus.checkpoint.deepspeed_layout import import_checkpoint

    source = _existing(arguments.directory)
    with _experts("import") as progress:
        stock = import_checkpoint(source, str(arguments.target), arguments.tag, progress=progress, **_rules(arguments))
    print(f"{arguments.target}: step {stock.global_steps}, {sum(stock.num_experts)} experts")
    if not stock.ep_size:
        print("only weights: there is no optimizer state of ZeRO stage 0. Load with load_module_only=True")
    return 0


def _rules(arguments: argparse.Namespace) -> dict[str, list[Rule]]:
    from megatron_lazarus.checkpoint.optimizer_state import rule_of_patterns

    # Conversion is work of the host; DeepSpeed need not look for a device, nor tell that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return {"rules": [rule_of_patterns(arguments.parameter_groups)]} if arguments.parameter_groups else {}


# -- common ---------------------------------------------------------------------------------------------------------


def _existing(directory: Path) -> str:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    return str(directory)


@contextmanager
def _progress(what: str, total: int, unit: str) -> Iterator[Any]:
    """A function that advances a bar on the terminal; without one nothing is shown."""
    from tqdm import tqdm

    with tqdm(
        total=total, unit=unit, unit_scale=unit == "B", desc=what, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar.update


@contextmanager
def _experts(what: str) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(unit="expert", desc=what, leave=False, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _numel(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
