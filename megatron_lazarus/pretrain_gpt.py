"""Pretrain a GPT with mixture-of-experts layers: ``deepspeed scripts/pretrain_gpt.py --deepspeed_config …``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.config import LazarusConfig, batch_sizes, refuse_unsupported, slots_per_rank
from megatron_lazarus.joining import joins_coordinator, private_world
from megatron_lazarus.models.arguments import check_arguments, parse_arguments
from megatron_lazarus.models.compatibility import check_checkpoint
from megatron_lazarus.models.data import Blend, MicroBatches, build_blends, unigram_entropy
from megatron_lazarus.models.gpt import GPTConfig, PretrainGPT
from megatron_lazarus.models.progress import Progress, on_rank_zero, validation_lines
from megatron_lazarus.models.settings import (
    MODEL_ARGUMENTS,
    build_optimizer,
    data_config,
    deepspeed_config,
    learning_rate_factor,
    model_config,
    parameter_groups,
    tera_flops_per_step,
)
from megatron_lazarus.models.tokenizer import build_tokenizer, identity, padded_vocab_size

TRACKER = "latest_checkpointed_iteration.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; return the exit status.

    Whatever is wrong with arguments, configuration or data ends in one line on stderr and status 2, before any
    process group is made.
    """
    args = parse_arguments(argv)
    _show_log()
    try:
        check_arguments(args)
        config = deepspeed_config(args)
        _check_sections(config, args.num_experts)
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file)
        vocab_size = padded_vocab_size(int(tokenizer.vocab_size), args.make_vocab_size_divisible_by)
        model = model_config(args, vocab_size)
        if args.load:
            check_checkpoint(args.load, model)
        blends = build_blends(data_config(args), tokenizer, identity(args.tokenizer_type, tokenizer))
    except (ValueError, CheckpointError) as error:
        # Every rank meets the same error. The first one tells; a launcher ends all as soon as any has left.
        if os.environ.get("RANK", "0") == "0":
            print(f"pretrain_gpt: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(10)
        return 2
    job = _Job(args, config, model, blends)
    job.train()
    job.finish()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class _Job:
    """One training run: the engine, its data and the loop."""

    def __init__(
        self, args: argparse.Namespace, config: dict[str, Any], model: GPTConfig, blends: dict[str, Blend]
    ) -> None:
        self.args = args
        self.model = model
        self.blends = blends
        self.batches = {
            split: MicroBatches(blend, args.micro_batch_size, args.global_batch_size) for split, blend in blends.items()
        }
        self._terminated = False
        self._newest: str | None = None
        if args.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        _init_distributed()
        self.engine = _engine(args, config, model)

    def train(self) -> None:
        """Run from the checkpoint, if any, to ``--train-iters`` or to the first reason to exit."""
        args, engine = self.args, self.engine
        started = time.monotonic()
        self._load()
        self._newest = engine.newest_checkpoint
        engine.ledger.planned_steps = args.train_iters
        progress = Progress(args, tera_flops_per_step(self.model, args.global_batch_size))
        saved = engine.global_steps
        while engine.global_steps < args.train_iters:
            result = engine.train_batch(self.batches["train"].micro_batch)
            iteration = engine.global_steps
            progress.add(result)
            if iteration % args.log_interval == 0:
                on_rank_zero(progress.line(iteration, _learning_rate(engine), dist.get_world_size(), engine.goodput))
            if args.eval_iters and iteration % args.eval_interval == 0 and iteration < args.train_iters:
                with progress.paused():
                    self._evaluate("validation", f"iteration {iteration}")
            if args.save_interval and iteration % args.save_interval == 0:
                with progress.paused():
                    self._save(iteration)
                saved = iteration
            self._tell_saved(dist.get_rank() == 0)
            if reason := self._exit_reason(iteration, started):
                on_rank_zero(f" [exiting program at iteration {iteration}: {reason}]")
                break
        iteration = engine.global_steps
        if args.save and saved != iteration:
            self._save(iteration, wait=True)
        if args.eval_iters and iteration >= args.train_iters:
            self._final_evaluation(iteration)

    def finish(self) -> None:
        """Wait for the last checkpoint and for the other members."""
        is_first = dist.get_rank() == 0
        # Under a coordinator there is no process group afterwards.
        self.engine.finish()
        self._tell_saved(is_first)

    def _final_evaluation(self, iteration: int) -> None:
        loss = self._evaluate("validation", f"iteration {iteration} on validation set")
        self._evaluate("test", f"iteration {iteration} on test set")
        if self.args.log_unigram_entropy and loss is not None:
            prefix = data_config(self.args).prefixes[0]
            entropy = unigram_entropy(prefix)
            on_rank_zero(
                f" unigram entropy of {prefix}: {entropy:.4f} nats per token | validation loss: {loss:.4f} "
                f"({entropy - loss:.4f} below)"
            )

    def _evaluate(self, split: str, where: str) -> float | None:
        if split not in self.batches:
            return None
        batches = self.batches[split]
        per_step = batches.global_batch_size // batches.micro_batch_size
        available = max(1, batches.samples.samples_per_epoch // batches.micro_batch_size)
        metrics = self.engine.eval_batch(batches.fixed, min(self.args.eval_iters * per_step, available))
        for line in validation_lines(where, metrics["lm loss"]):
            on_rank_zero(line)
        return float(metrics["lm loss"])

    def _save(self, iteration: int, wait: bool = False) -> None:
        folder = self.args.save
        on_rank_zero(f"saving checkpoint at iteration {iteration:7d} to {folder}")
        state = {
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "consumed_samples": iteration * self.args.global_batch_size,
            "tokens": iteration * self.args.global_batch_size * self.args.seq_length,
            "args": self._recorded_arguments(),
        }
        self.engine.save_checkpoint(folder, client_state=state, wait=wait)

    def _tell_saved(self, is_first: bool) -> None:
        """Say so on the first rank, and keep Megatron's tracker, when a save turns out to be complete."""
        newest = self.engine.newest_checkpoint
        if newest is None or newest == self._newest:
            return
        self._newest = newest
        if not is_first:
            return
        folder, tag = os.path.split(newest)
        iteration = int(tag.removeprefix("global_step"))
        temporary = Path(folder, TRACKER + ".tmp")
        temporary.write_text(str(iteration), encoding="utf-8")
        os.replace(temporary, Path(folder, TRACKER))
        print(f"  successfully saved checkpoint at iteration {iteration:7d} to {folder}", flush=True)

    def _load(self) -> None:
        args = self.args
        if not args.load or self.engine.joined_running:
            return
        if not Path(args.load, "latest").is_file():
            on_rank_zero(f"WARNING: no checkpoint in {args.load}; starting from random weights")
            return
        options: dict[str, Any] = {}
        if args.finetune:
            options = {"load_module_only": True}
        elif args.no_load_optim:
            options = {"load_optimizer_states": False}
        path, state = self.engine.load_checkpoint(args.load, **options)
        self._check_same_run(state.get("args", {}))
        on_rank_zero(f"  successfully loaded checkpoint from {path} at iteration {self.engine.global_steps}")

    def _recorded_arguments(self) -> dict[str, Any]:
        names = (*MODEL_ARGUMENTS, "global_batch_size", "micro_batch_size", "split", "data_path")
        return {"padded_vocab_size": self.model.vocab_size, **{name: getattr(self.args, name) for name in names}}

    def _check_same_run(self, recorded: dict[str, Any]) -> None:
        """Tell of arguments that make this run another one than the checkpoint's."""
        changed = [
            f"{name} {recorded[name]} -> {value}"
            for name, value in self._recorded_arguments().items()
            if name in recorded and recorded[name] != value
        ]
        if changed and not self.args.finetune:
            on_rank_zero(f"WARNING: the checkpoint was written with other arguments: {', '.join(changed)}")

    def _exit_reason(self, iteration: int, started: float) -> str | None:
        args = self.args
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        minutes = (time.monotonic() - started) / 60
        local = [
            ("SIGTERM", args.exit_signal_handler, self._terminated),
            ("--exit-duration-in-mins", args.exit_duration_in_mins, minutes > (args.exit_duration_in_mins or 0)),
            ("--kill-switch-file", args.kill_switch_file, os.path.exists(args.kill_switch_file or "")),
        ]
        asked_for = [(name, bool(happened)) for name, wanted, happened in local if wanted]
        if not asked_for:
            return None
        # Clocks, signals and file systems differ between ranks; all must leave at the same step.
        flags = self.engine.any_rank([happened for _, happened in asked_for])
        return next((name for (name, _), flag in zip(asked_for, flags, strict=True) if flag), None)

    def _on_sigterm(self, *_: Any) -> None:
        self._terminated = True


def _check_sections(config: dict[str, Any], num_experts: int) -> None:
    """Raise ConfigError for what ``initialize`` would refuse only after the model, and so a process group, is made."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    section = LazarusConfig.from_json(config.get("lazarus", {}))
    joins = joins_coordinator(section)
    refuse_unsupported({key: value for key, value in config.items() if key != "lazarus"})
    batch_sizes(config, world_size)
    if num_experts > 1 and not joins:
        slots_per_rank(section.experts, num_experts, world_size)


def _show_log() -> None:
    """Print what the package logs, once per job; other libraries' loggers stay as they are."""
    log = logging.getLogger("megatron_lazarus")
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[lazarus] %(message)s"))
    log.handlers = [handler]


def _init_distributed() -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # A worker killed while it builds this extension leaves a lock that every later start would wait for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" in os.environ and "LAZARUS_COORDINATOR" not in os.environ:
        deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)
    else:
        # Started without a launcher, or by an agent, which brings this process into a world later.
        private_world()


def _engine(args: argparse.Namespace, config: dict[str, Any], model_configuration: GPTConfig) -> Any:
    import megatron_lazarus

    model = PretrainGPT(model_configuration)
    if args.float64:
        model = model.double()
    factor = learning_rate_factor(args)
    if "optimizer" in config:
        # The JSON's optimizer wins, with its own learning rate; the schedule scales that.
        chosen: dict[str, Any] = {
            "model_parameters": parameter_groups(args, model),
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        }
    else:
        optimizer = build_optimizer(args, model)
        chosen = {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        }
    engine, *_ = megatron_lazarus.initialize(model=model, config=config, seed=args.seed, **chosen)
    return engine


def _learning_rate(engine: Any) -> float:
    return float(engine.get_lr()[0])


if __name__ == "__main__":
    sys.exit(main())
