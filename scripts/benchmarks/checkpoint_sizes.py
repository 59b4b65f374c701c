"""Sizes of partial checkpoints: files written for real, against the formulas and the published reductions.

    python scripts/benchmarks/checkpoint_sizes.py [--directory DIR] [--shape NAME …]

Three GPT-MoE models with bf16 parameters, fp32 master weights and fp32 moments (14 bytes a parameter). No model is
built: shapes come from the model on the meta device, records are random bytes, made and written one at a time. With
K = 1 experts a layer every file of a save is on disk for a moment; other K follow from the sizes of those files, since
all experts of a layer are alike. Which rank writes what is decided as in training, for one rank per expert of a layer
with two replicas of each expert. Exits with 1 if a wanted number is missed.

What stock DeepSpeed's busiest rank writes of the same model, world and ep_size follows from its layout. ZeRO stage 0
("as written"): rank 0 writes the dense weights with its whole optimizer (dense part and its experts), its expert files,
and the same optimizer a second time for its expert-parallel rank; "without the repetition" leaves the second copy out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron_lazarus.checkpoint.dense import pieces, shard_file
from megatron_lazarus.checkpoint.image import FileImage
from megatron_lazarus.checkpoint.manifest import ExpertEntry, FileEntry, Manifest, PartEntry
from megatron_lazarus.checkpoint.selection import Rotation
from megatron_lazarus.checkpoint.sharing import Unit, piece_limit, share
from megatron_lazarus.checkpoint.writer import CONTENTS, parts_of, record_file, write_image, write_part
from megatron_lazarus.config import ExpertsConfig
from megatron_lazarus.placing import plan_for

FIELDS = {
    "parameter": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "step": torch.float32,
}
BYTES = 14
"""Of one parameter: 2 for bf16, 4 each for master and two moments."""


@dataclass(frozen=True)
class Shape:
    """A GPT. ``smaller``: published share by which K = 1 is smaller than a whole checkpoint, by content."""

    name: str
    layers: int
    hidden: int
    heads: int
    experts: int
    interval: int
    smaller: Mapping[str, float]


SHAPES = (
    Shape("12 layers, 8 experts, all MoE", 12, 768, 12, 8, 1, {"all": 0.75, "moments": 0.542}),
    Shape("12 layers, 8 experts, half MoE", 12, 768, 12, 8, 2, {"all": 0.61}),
    Shape("GPT-350M-16E", 24, 1024, 16, 16, 2, {"all": 0.80, "moments": 0.577}),
)
BOTTLENECK = 0.769
"""Published: less work for the busiest rank (arXiv 2408.04307 v1, abstract)."""


@dataclass(frozen=True)
class Model:
    """Shapes of the dense parameters, and of one expert's of every MoE layer."""

    dense: dict[str, list[int]]
    layers: list[dict[str, list[int]]]
    experts: int

    @property
    def dense_numel(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.dense.values())

    @property
    def expert_numel(self) -> int:
        """Of all experts."""
        return self.experts * sum(int(np.prod(shape)) for layer in self.layers for shape in layer.values())

    def formula(self, content: str, k: int) -> float:
        """Bytes of a save of ``k`` experts a layer (MoC-System, equation 6; "moments": masters of all besides)."""
        share_saved = k / self.experts
        always, partial = (0, BYTES) if content == "all" else (4, BYTES - 4)
        return BYTES * self.dense_numel + self.expert_numel * (always + partial * share_saved)


def model_of(shape: Shape) -> Model:
    from megatron_lazarus.models.gpt import GPTConfig, PretrainGPT

    config = GPTConfig(
        vocab_size=50304,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=2048,
        max_position_embeddings=2048,
        num_experts=shape.experts,
        expert_interval=shape.interval,
    )
    with torch.device("meta"):
        model = PretrainGPT(config)
    dense: dict[str, list[int]] = {}
    layers: dict[str, dict[str, list[int]]] = {}
    for name, parameter in model.named_parameters():
        prefix, marker, rest = name.partition(".deepspeed_experts.")
        if not marker:
            dense[name] = list(parameter.shape)
        elif rest.startswith("0."):
            layers.setdefault(prefix, {})[rest.removeprefix("0.")] = list(parameter.shape)
    return Model(dense, list(layers.values()), shape.experts)


@dataclass(frozen=True)
class Saved:
    """One save with K = 1: bytes of every file, by what it is and who wrote it."""

    total: int
    on_disk: int
    dense: int
    whole_record: int
    """Of all parts of one expert of every layer, summed over layers."""
    by_rank: list[int]
    seconds: float


def save(directory: str, model: Model, content: str, source: np.random.Generator) -> Saved:
    """Write one save of one expert per layer, measure it, delete it."""
    started, tag = time.perf_counter(), "global_step1000"
    folder = os.path.join(directory, tag)
    for name in ("experts", "dense"):
        os.makedirs(os.path.join(folder, name))
    world = model.experts
    selection = Rotation([model.experts] * len(model.layers)).select(
        "sequential", 1, [[0.0] * model.experts for _ in model.layers]
    )
    plan = plan_for([np.ones(model.experts)] * len(model.layers), ExpertsConfig(), list(range(world)))
    units: list[Unit] = []
    work: list[tuple[int, int, bool, list[str]] | str] = []
    for layer, chosen in enumerate(selection):
        numel = sum(int(np.prod(shape)) for shape in model.layers[layer].values())
        for expert in range(model.experts):
            for master, fields in parts_of(content, expert in chosen, list(FIELDS)):
                size = sum(FIELDS[field].itemsize * (1 if field == "step" else numel) for field in fields)
                units.append(Unit(size, plan.layers[layer].holders(expert)))
                work.append((layer, expert, master, fields))
    stand_ins = {
        f"{field}/{name}": torch.empty(shape, dtype=dtype, device="meta")
        for field, dtype in FIELDS.items()
        if field != "step"
        for name, shape in model.dense.items()
    }
    total = sum(tensor.nbytes for tensor in stand_ins.values())
    cut = pieces(stand_ins, piece_limit(total, world))
    for name, piece in cut.items():
        units.append(Unit(piece.nbytes, range(world)))
        work.append(name)
    writers = share(units, world)

    by_rank = [0] * world
    entries: dict[tuple[int, int], list[PartEntry]] = {}
    for rank, what in zip(writers, work, strict=True):
        if isinstance(what, str):
            continue
        layer, expert, master, fields = what
        tensors = {
            f"{field}/{name}": random_tensor(source, shape, FIELDS[field])
            for field in fields
            if field != "step"
            for name, shape in model.layers[layer].items()
        }
        if "step" in fields:
            tensors["step"] = torch.ones(1)
        image = FileImage.of(tensors)
        part = write_part(directory, tag, record_file(layer, expert, master=master), image, step=1000, tokens=0.0)
        forget(os.path.join(folder, part.name))
        entries.setdefault((layer, expert), []).append(part)
        by_rank[rank] += part.bytes
    files: list[FileEntry] = []
    for rank in range(world):
        mine = [what for writer, what in zip(writers, work, strict=True) if writer == rank and isinstance(what, str)]
        shard = {name: random_tensor(source, list(cut[name].shape), cut[name].dtype) for name in mine}
        files.append(write_image(folder, shard_file(rank), FileImage.of(shard)))
        forget(os.path.join(folder, files[-1].name))
        by_rank[rank] += files[-1].bytes
    experts = [ExpertEntry(layer, expert, parts) for (layer, expert), parts in entries.items()]
    description = {
        "dense": model.dense,
        "moe_layers": [{"num_experts": model.experts, "tensors": t} for t in model.layers],
    }
    manifest = Manifest(tag, 0, 1000, description, files, content, experts)
    manifest.write(folder)
    on_disk = sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names)
    shutil.rmtree(folder)
    chosen_parts = [part for entry in experts if entry.expert in selection[entry.layer] for part in entry.parts]
    return Saved(
        total=sum(entry.bytes for _, entry, _ in manifest.all_files()),
        on_disk=on_disk,
        dense=sum(entry.bytes for entry in files),
        whole_record=sum(part.bytes for part in chosen_parts),
        by_rank=by_rank,
        seconds=time.perf_counter() - started,
    )


def random_tensor(source: np.random.Generator, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.frombuffer(bytearray(source.bytes(count)), dtype=torch.uint8).view(dtype).view(shape)


def forget(path: str) -> None:
    """Give the file's pages in memory back: it will not be read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def with_k(model: Model, saved: Saved, content: str, k: int) -> float:
    """Bytes of a save of ``k`` experts a layer, from the files of the one with K = 1."""
    unchosen = 0.0
    if content == "moments":
        unchosen = (saved.total - saved.dense - saved.whole_record) / (model.experts - 1)
    return saved.dense + k * saved.whole_record + (model.experts - k) * unchosen


def stock_bottleneck(model: Model, repeated: bool) -> float:
    """Bytes of stock's rank 0 under ZeRO stage 0, ep_size = world = experts of a layer: see the module's text."""
    experts = model.expert_numel / model.experts
    optimizer = (BYTES - 2) * (model.dense_numel + experts)
    return 2 * (model.dense_numel + experts) + (2 if repeated else 1) * optimizer


def sharded_bottleneck(model: Model) -> float:
    """The same under ZeRO stages 1 and 2, where optimizer state is sharded over ranks and weights are not."""
    experts = model.expert_numel / model.experts
    return 2 * (model.dense_numel + experts) + (BYTES - 2) * (model.dense_numel + model.expert_numel) / model.experts


def report(shape: Shape, directory: str) -> list[str]:
    """Measure and print one shape; returns what is missed."""
    model = model_of(shape)
    missed: list[str] = []

    def demand(holds: bool, text: str) -> None:
        if not holds:
            missed.append(f"{shape.name}: {text}")

    print(
        f"{shape.name}: {(model.dense_numel + model.expert_numel) / 1e6:.0f} M parameters, "
        f"{model.expert_numel / 1e6:.0f} M of them in {len(model.layers)} layers of {model.experts} experts; "
        f"{model.experts} ranks"
    )
    print(f"  {'content':<9}{'K':>4}{'GB':>9}{'formula':>9}{'smaller':>9}{'wanted':>9}")
    results = {content: save(directory, model, content, np.random.default_rng(0)) for content in CONTENTS}
    whole = with_k(model, results["all"], "all", model.experts)
    for content, saved in results.items():
        demand(saved.total <= saved.on_disk < 1.01 * saved.total, f"{content}: the manifest and the disk disagree")
        for k in (1, 2, 4, model.experts):
            size, expected = with_k(model, saved, content, k), model.formula(content, k)
            # A file with the weights apart has a header of its own: a few bytes more in all.
            smaller = round(1 - size / whole, 4) + 0.0
            wanted = shape.smaller.get(content) if k == 1 else None
            demand(abs(size / expected - 1) <= 0.01, f"{content}, K={k}: {size} bytes, the formula says {expected}")
            if wanted is not None:
                demand(smaller >= wanted, f"{content}, K=1: {smaller:.1%} smaller, wanted {wanted:.1%}")
            name = "all" if k == model.experts else str(k)
            target = "" if wanted is None else f">= {wanted:.1%}"
            print(f"  {content:<9}{name:>4}{size / 1e9:>9.3f}{expected / 1e9:>9.3f}{smaller:>9.1%}{target:>9}")
    baselines = {
        "stock, stage 0 as written": stock_bottleneck(model, True),
        "stock, stage 0 without the repetition": stock_bottleneck(model, False),
        "stock, stages 1-2": sharded_bottleneck(model),
    }
    print(f"  busiest rank, GB:  {', '.join(f'{name} {size / 1e9:.3f}' for name, size in baselines.items())}")
    for content, saved in results.items():
        busiest = max(saved.by_rank)
        less = {name: 1 - busiest / size for name, size in baselines.items()}
        print(
            f"  {content}, K = 1: {busiest / 1e9:.3f} (idlest rank {min(saved.by_rank) / 1e9:.3f}), less than these by "
            f"{', '.join(f'{share_less:.1%}' for share_less in less.values())}; written in {saved.seconds:.0f} s"
        )
        as_written = less["stock, stage 0 as written"]
        demand(as_written >= BOTTLENECK, f"{content}: busiest rank {as_written:.1%} less, wanted {BOTTLENECK:.1%}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where to write, up to 12 GB at a time (default: the temporary directory)")
    parser.add_argument("--shape", action="append", choices=[shape.name for shape in SHAPES], help="only these")
    arguments = parser.parse_args()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    missed = []
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="checkpoint_sizes_") as directory:
        free = shutil.disk_usage(directory).free
        if free < 15e9:
            print(f"{directory} has {free / 1e9:.1f} GB free; 15 are needed", file=sys.stderr)
            return 2
        for shape in SHAPES:
            if not arguments.shape or shape.name in arguments.shape:
                missed += report(shape, directory)
    for text in missed:
        print(f"MISSED {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
