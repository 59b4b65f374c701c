"""DeepSpeed's checkpoint engine with partial expert checkpoints, and all of it that the rest of the package uses.

A save returns when the copy of the state into host memory has begun. The next update waits for that copy, and for
nothing else; files are written, and the checkpoint is published, in the background.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from megatron_lazarus.checkpoint.attempt import Attempt, Save, is_published, tokens_of
from megatron_lazarus.checkpoint.background import BackgroundWriter
from megatron_lazarus.checkpoint.files import CheckpointError, fsync_path
from megatron_lazarus.checkpoint.history import SaveHistory, Signal
from megatron_lazarus.checkpoint.loading import Loader
from megatron_lazarus.checkpoint.model import Experts
from megatron_lazarus.checkpoint.parameter_groups import KEY
from megatron_lazarus.checkpoint.safety import load, refuse_unsafe
from megatron_lazarus.checkpoint.saving import Saver, Settings
from megatron_lazarus.checkpoint.stock_loading import load_stock, stock_tag
from megatron_lazarus.json_exchange import gather_json

logger = logging.getLogger(__name__)

EXIT_LIMIT_S = 120.0
"""How long a process that ends waits for its last save."""

_SLICE_S = 1.0


@dataclass(frozen=True)
class FullSaves:
    """Without a section ``lazarus.checkpoint``: everything, kept for ever, complete when the call returns."""

    persist_experts: int | Literal["all"] = "all"
    selection: Literal["sequential", "load_aware"] = "sequential"
    content: Literal["all", "moments"] = "all"
    max_lost_token_fraction: float = 1.0
    dynamic_k: bool = False
    keep_last: int | None = None
    strict: bool = False


class PartialExpertCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed's engine calls: it gathers the dense state, this class takes it over on every rank."""

    def __init__(self, checkpoint: ExpertCheckpoint) -> None:
        super().__init__()
        self.name = "PartialExpertCheckpointEngine"
        self._checkpoint = weakref.ref(checkpoint)

    def create(self, info: Any) -> None:
        """Nothing: the tag was agreed on before DeepSpeed was asked."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders of a save in progress exist; others are made."""
        if not self._owner().is_saving:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Take over the dense state of a save; outside of one, write ``path`` at once."""
        refuse_unsafe(state_dict, "checkpoint")
        if self._owner().is_saving:
            self._owner().take(state_dict)
        else:
            torch.save(state_dict, path)
            fsync_path(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The dense state, whoever wrote it, without running a pickle. Raises CheckpointError."""
        if (reading := self._owner().loader.reading) is not None:
            return reading
        with open(path, "rb") as file:
            return load(file.read(), path, map_location)

    def commit(self, info: Any) -> bool:
        """Nothing: a checkpoint is published when all of it is on storage, in the background."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Every rank writes a share."""
        return True

    def _owner(self) -> ExpertCheckpoint:
        checkpoint = self._checkpoint()
        assert checkpoint is not None, "the checkpoint engine outlives its engine"
        return checkpoint


class ExpertCheckpoint:
    """Saves and loads the whole model of one engine.

    ``settings`` None: every save is complete when the call returns. ``history.newest`` is the tag directory last
    published or loaded.
    """

    def __init__(self, ds_engine: Any, experts: Experts, settings: Any = None) -> None:
        self._engine, self._experts = ds_engine, experts
        self.settings: Settings = settings or FullSaves()
        self._always_waits = settings is None
        counts = [layer.num_experts for layer in experts.layers]
        self.history = SaveHistory(counts, lambda: experts.rank, bool(settings and settings.strict))
        self.writer = BackgroundWriter()
        self.history.withdraw = self.writer.withdraw
        self.saver = Saver(ds_engine, experts, self.settings, self.history, self.writer, self._gather)
        self.loader = Loader(ds_engine, experts, self._gather)
        self._taken: list[Any] = []
        self.is_saving = False
        ds_engine.checkpoint_engine = PartialExpertCheckpointEngine(self)
        # All ranks have agreed on the tag before DeepSpeed is asked, which would take two collectives more for that.
        ds_engine._checkpoint_tag_validation = lambda tag: None
        # At the end of the process, or when nobody uses this any more.
        self._close = weakref.finalize(self, self.writer.close, EXIT_LIMIT_S)

    # -- save ---------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        save_latest: bool,
        without_frozen: bool,
        again: bool = False,
        wait: bool = False,
    ) -> bool:
        """Begin a save, and with ``wait`` end it; returns whether it goes well as far as is known then.

        ``again``: this rank has tried before, at this step, and a rank was lost. Raises CheckpointError where a failed
        save must stop the run.
        """
        refuse_unsafe(client_state, "client_state")
        tag = str(tag) if tag is not None else f"global_step{self._engine.global_steps}"
        try:
            attempt = self.saver.agree(save_dir, tag, again)
        except CheckpointError as error:
            self.history.failed(os.path.join(save_dir, tag), str(error))
            self.history.stop_if_strict()
            return False
        if attempt.complete:
            self.saver.give_up()
            self.history.newest = attempt.directory
            return True
        save = self._begin(attempt, client_state, save_latest, without_frozen)
        if wait or self._always_waits:
            return self.wait_for(save)
        return True

    def _begin(
        self, attempt: Attempt, client_state: Mapping[str, Any], save_latest: bool, without_frozen: bool
    ) -> Save:
        self._taken, self.is_saving = [], True
        # DeepSpeed worked this out for the engine it made itself.
        self._engine.save_non_zero_checkpoint = True
        try:
            with self._experts.context.dense_only():
                self._engine.save_checkpoint(
                    attempt.save_dir,
                    tag=attempt.tag,
                    client_state=dict(client_state),
                    save_latest=False,
                    exclude_frozen_parameters=without_frozen,
                )
            return self.saver.begin(attempt, self._taken.pop(), save_latest)
        except BaseException:
            if self._experts.rank == 0:
                self.saver.discard(attempt)
            raise
        finally:
            self.is_saving = False
            self._taken = []
            self.saver.give_up()

    def take(self, state: Any) -> None:
        """DeepSpeed's dense state: live tensors."""
        self._taken.append({**state, KEY: self._experts.parameter_groups.to_json()})

    def wait_for(self, save: Save, limit_s: float | None = None) -> bool:
        """Wait until all ranks know what becomes of a save; returns whether it is complete.

        After ``limit_s`` seconds of rank 0's clock, if given, it is left as it is.
        """
        started = time.monotonic()
        deadline = started + 2 * self.writer.limit_s
        while True:
            if not save.decided.wait(_SLICE_S) and time.monotonic() > deadline:
                save.decide(False, f"it is not written within {2 * self.writer.limit_s:g} s")
            late = limit_s is not None and time.monotonic() - started > limit_s
            # Rank 0 says: the others know of their parts only.
            decided, published, late = self._gather([save.decided.is_set(), save.published, late])[0]
            if decided:
                break
            if late:
                return False
        if save in self.history.in_flight:
            self.history.conclude(save, published)
        self.history.stop_if_strict()
        return bool(published)

    def finish(self, limit_s: float | None = None) -> bool:
        """Wait for all saves in flight, all ranks together; returns whether they are complete. See ``wait_for``."""
        outcomes = [self.wait_for(save, limit_s) for save in list(self.history.in_flight)]
        return all(outcomes)

    def close(self) -> None:
        """End the background thread, after what it still has to do; let the directory go."""
        self._close()

    # -- while training -----------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Parameters and optimizer state are about to change, or experts to move: copies must be complete."""
        for snapshot in self.saver.snapshots:
            snapshot.ordered()
        self.saver.snapshots.clear()

    def committed(self, loads: Sequence[Any]) -> None:
        """A step was committed, in which experts got so many tokens, by layer."""
        self.history.ledger.add(loads)

    def signal(self) -> Signal:
        """What this rank adds to a vote."""
        return self.history.signal() if self._experts.rank == 0 else [0.0, 0.0]

    def hear(self, signal: Signal) -> None:
        """What the vote says of saves."""
        self.history.hear(signal)

    # -- when a generation breaks -------------------------------------------------------------------------------

    def interrupt(self) -> list[int]:
        """Complete no save that is in flight; returns the numbers of those that are complete all the same."""
        self.before_update()
        self.writer.cancel("the generation broke while it was being written")
        # What rank 0 is now may have published nothing itself.
        self.writer.newest = None
        return [save.attempt.number for save in self.history.in_flight if is_published(save.attempt)]

    def settle(self, published: Collection[int]) -> None:
        """Conclude all saves in flight; any member says which are complete."""
        for save in list(self.history.in_flight):
            self.history.conclude(save, save.attempt.number in published)

    def read_record(self, directory: str, layer: int, expert: int) -> tuple[Any, float]:
        """One expert's record, as a buffer of one row, and the tokens it holds."""
        record, manifest = self.loader.record(directory, layer, expert)
        return record, tokens_of(manifest.record(layer, expert))

    # -- load ---------------------------------------------------------------------------------------------------

    def load(
        self, load_dir: str, tag: str | None, *, load_optimizer_states: bool, load_module_only: bool, **options: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(tag directory, client state) of the checkpoint that was loaded; (None, None) if there is none."""
        self.finish()
        with_state = load_optimizer_states and not load_module_only
        options.update(load_optimizer_states=load_optimizer_states, load_module_only=load_module_only)
        if (stock := stock_tag(load_dir, tag, self._gather)) is not None:
            # What lazarus counts begins here: of what the run did before, nothing is known.
            return os.path.join(load_dir, stock), load_stock(self.loader, load_dir, stock, with_state, **options)
        chosen = self.loader.choose(load_dir, str(tag) if tag is not None else None, with_state)
        if chosen is None:
            logger.warning("no checkpoint in %s: there is no file 'latest'", load_dir)
            return None, None
        name, manifest = chosen
        client_state = self.loader.load(load_dir, name, manifest, with_state, **options)
        directory = os.path.join(load_dir, name)
        if load_module_only:
            # The weights begin another run, with an account of its own.
            return directory, client_state
        self.history.loaded(directory, manifest)
        self.writer.newest = load_dir, manifest
        return directory, client_state

    def _gather(self, mine: Any) -> list[Any]:
        return [mine] if self._experts.plan.world_size == 1 else gather_json(mine)
