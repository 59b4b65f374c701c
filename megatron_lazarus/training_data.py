"""A map-style dataset as the steps of a run: the same samples in the same step, whatever number of ranks there are.

Epochs follow one another without a gap, each in an order of its own; a step takes the next ``global_batch_size``
samples of that row, and its micro-batch m every M-th of them, from the m-th on. For one micro-batch a rank that is
what stock DeepSpeed's sampler gives, as long as its padding repeats no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from megatron_lazarus.config import BatchSizes, ConfigError
from megatron_lazarus.planning.batches import Round, micro_batches, shares_around

Place = Callable[[], tuple[int, int]]
"""() -> (rank, number of ranks) now."""


class MapStyle(Protocol):
    """A dataset whose samples have numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class SampleOrder:
    """Which samples a step takes: a function of the numbers given here, and of nothing else.

    ``drop_last``: an epoch leaves out its last samples where they fill no global batch; else the step that they begin
    is filled with the first ones of the next epoch. The order of epoch e is that of torch's DistributedSampler with
    ``seed`` and ``set_epoch(e)``.
    """

    def __init__(self, length: int, sizes: BatchSizes, seed: int = 0, drop_last: bool = False) -> None:
        self.sizes, self._seed, self._length = sizes, seed, length
        self.epoch_length = length - length % sizes.global_batch_size if drop_last else length
        if self.epoch_length < 1:
            raise ConfigError(
                f"training_data has {length} samples: with drop_last that is less than one global batch of "
                f"{sizes.global_batch_size}"
                if drop_last
                else "training_data has no samples"
            )
        self._permutations: dict[int, Tensor] = {}

    def micro_batch(self, step: int, number: int) -> list[int]:
        """The samples of micro-batch ``number`` of ``step``."""
        total = self.sizes.micro_batches
        first = step * self.sizes.global_batch_size + number
        return [self._sample(first + total * index) for index in range(self.sizes.micro_batch_size)]

    def epoch_of(self, step: int) -> int:
        """The epoch in which ``step`` ends."""
        return ((step + 1) * self.sizes.global_batch_size - 1) // self.epoch_length

    def steps_in(self, epoch: int) -> int:
        """How many steps end in ``epoch``."""
        size = self.sizes.global_batch_size
        return (epoch + 1) * self.epoch_length // size - epoch * self.epoch_length // size

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self.epoch_length)
        if epoch not in self._permutations:
            for old in [known for known in self._permutations if known < epoch - 1]:
                del self._permutations[old]
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._permutations[epoch] = torch.randperm(self._length, generator=generator)
        return int(self._permutations[epoch][index])


@dataclass(frozen=True)
class _Handed:
    """A round that was handed out; ``kept``: the batch stays with whoever got it, until the step is committed."""

    step: int
    number: Round
    kept: bool


class TrainingData:
    """The loader that ``initialize`` returns: this rank's rounds, step by step, as batches.

    All ranks get equally many rounds; one that has no micro-batch left gets some other one of the step, and the
    engine lets it count for nothing. An iteration lasts until the epoch ends, and begins where the run stands: after
    ``load_checkpoint`` in the middle of an epoch. ``step`` is the first step that is not committed. What was handed
    out for it is remembered, so that the step can be done again and shared out anew.
    """

    def __init__(self, dataset: MapStyle, order: SampleOrder, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, self.order = dataset, order
        self.collate_fn = collate_fn or default_collate
        self.place: Place = lambda: (0, 1)
        self.begins: Callable[[], None] = lambda: None
        self.step = 0
        self._epoch, self._ended = 0, False
        self._rounds: tuple[Round, ...] | None = None
        self._handed: list[_Handed] = []
        self._done = 0
        self.lends = False
        """Whether what is handed out now will be fetched again by whoever does the step again."""

    # -- for the script -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the epoch in progress, or of the one that comes next, for the present number of ranks."""
        epoch = self._epoch + self._ended
        return self.order.steps_in(epoch) * -(-self.order.sizes.micro_batches // self.place()[1])

    def __iter__(self) -> TrainingData:
        self._epoch, self._ended = self._epoch + self._ended, False
        return self

    def __next__(self) -> Any:
        step, index = self._next()
        if self.order.epoch_of(step) > self._epoch:
            self._ended = True
            raise StopIteration
        rounds = self._rounds_of(step)
        self._handed.append(_Handed(step, rounds[index], kept=not self.lends))
        self.begins()
        number = rounds[index]
        # A rank without one needs some samples, of the same shape.
        return self._fetch(step, number if number is not None else next((one for one in rounds if one is not None), 0))

    def _fetch(self, step: int, number: int) -> Any:
        indices = self.order.micro_batch(step, number)
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.collate_fn(fetch(indices) if fetch else [self.dataset[index] for index in indices])

    def _next(self) -> tuple[int, int]:
        """Step and round that are handed out next."""
        if not self._handed:
            return self.step, 0
        step = self._handed[-1].step
        index = sum(entry.step == step for entry in self._handed)
        return (step, index) if index < len(self._rounds_of(step)) else (step + 1, 0)

    def _rounds_of(self, step: int) -> tuple[Round, ...]:
        if step == self.step and self._rounds is not None:
            return self._rounds
        rank, world_size = self.place()
        total = self.order.sizes.micro_batches
        share = micro_batches(total, world_size)[rank]
        return (*share, *[None] * (-(-total // world_size) - len(share)))

    # -- for the engine -----------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds of the step in progress."""
        return len(self._rounds_of(self.step))

    @property
    def in_use(self) -> bool:
        """Whether what is computed now is of a batch that was handed out here."""
        return bool(self._handed)

    @property
    def round(self) -> int:
        """Rounds of the step in progress that have had their backward."""
        return self._done

    @property
    def has_last(self) -> bool:
        """Whether no batch of the step in progress is to be fetched any more by a script that does one at a time."""
        return min(self._done + 1, len(self._handed)) >= self.rounds

    @property
    def number(self) -> Round:
        """The micro-batch that is forwarded now."""
        return self._handed[min(self._done, len(self._handed) - 1)].number

    @property
    def is_ahead(self) -> bool:
        """Whether what is forwarded now is of a later step."""
        return bool(self._handed) and self._handed[min(self._done, len(self._handed) - 1)].step > self.step

    def backwarded(self) -> None:
        """The round in progress has had its backward."""
        self._done = min(self._done + 1, len(self._handed))

    def begin_again(self) -> None:
        """The step in progress is done again, with what the script has; the rest is handed out anew."""
        self._done = 0
        self._handed = [entry for entry in self._handed if entry.kept]

    def committed(self) -> None:
        """The step in progress is committed."""
        self.step += 1
        self._clear()
        self._handed = [entry for entry in self._handed if entry.step >= self.step]

    def dropped(self) -> None:
        """The step in progress is given up: its samples are handed out again."""
        ahead: list[Round] = [None for entry in self._handed if entry.step > self.step]
        self._clear()
        self._share([ahead] * self.place()[1])

    def report(self) -> list[list[Any]]:
        """[step, micro-batch] of what this rank holds, in order, as JSON: for ``share_out`` on all ranks."""
        return [[entry.step, entry.number] for entry in self._handed if entry.kept]

    def share_out(self, reports: Sequence[Sequence[Sequence[Any]]], least: int = 1) -> None:
        """Share the step in progress out anew, after a change of the world, in ``least`` rounds; ``reports`` by rank.

        What was fetched ahead, for a later step, counts for nothing now, and comes again.
        """
        held = [[n if step == self.step else None for step, n in report if step >= self.step] for report in reports]
        self._done = 0
        self._share(held, least)

    def _share(self, held: Sequence[Sequence[Round]], least: int = 1) -> None:
        rank = self.place()[0]
        self._handed = [_Handed(self.step, number, kept=True) for number in held[rank]]
        self._rounds = shares_around(self.order.sizes.micro_batches, held, least)[rank]

    def _clear(self) -> None:
        self._done, self._rounds = 0, None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The position, for ``restore``."""
        sizes = self.order.sizes
        return {
            "step": self.step,
            "epoch_length": self.order.epoch_length,
            "micro_batch_size": sizes.micro_batch_size,
            "micro_batches": sizes.micro_batches,
        }

    def join(self, step: int) -> None:
        """Go on at ``step``, of a run in progress; epochs that are over will be empty iterations here."""
        self._clear()
        self.step, self._handed = step, []

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises ConfigError if that was with other data or other batches."""
        mine = self.state()
        for name in ("epoch_length", "micro_batch_size", "micro_batches"):
            if state[name] != mine[name]:
                raise ConfigError(
                    f"the checkpoint's position in training_data is for {name} {state[name]}, here it is {mine[name]}: "
                    "which samples come next cannot be told"
                )
        self.join(int(state["step"]))
        self._epoch, self._ended = self.order.epoch_of(self.step), False


def training_loader(
    dataset: Any,
    sizes: BatchSizes,
    ds_config: Mapping[str, Any],
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> TrainingData:
    """The loader for ``initialize(training_data=dataset)``. Raises ConfigError if samples have no numbers."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"training_data is a {type(dataset).__name__}; it must be a map-style dataset (with __getitem__ and "
            "__len__), whose samples can be fetched again; feed an iterable one to the engine yourself"
        )
    drop_last = bool(ds_config.get("dataloader_drop_last", False))
    return TrainingData(dataset, SampleOrder(len(dataset), sizes, seed, drop_last), collate_fn)
