"""The ``"lazarus"`` section of a DeepSpeed JSON config, and what of the rest the plugin must check or refuse.

Everything here runs before any process group or file exists and raises ``ConfigError`` with the key, the value and
what would be legal.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from megatron_lazarus.elastic.settings import ElasticConfig

_Section = TypeVar("_Section")


class ConfigError(ValueError):
    """A configuration that cannot work; the message names key, value and legal values."""


@dataclass(frozen=True)
class ExpertsConfig:
    """How experts live on ranks.

    ``slots_per_rank``: room for expert records per MoE layer and rank; null: just enough for ``min_replicas`` of each.
    ``min_replicas``: wanted replicas of every expert, as far as slots and ranks allow; f in Lazarus' equation 1.
    ``max_imbalance``: where planning would give the busiest rank more than so many times the tokens of the mean, it
    gives up survival of ``min_replicas`` and more losses at once for less; null: survival comes first.
    ``max_tokens_per_expert_chunk``: experts work on more tokens than this in recomputed chunks; null: no limit.
    ``split``: how replicas share an expert's tokens: "quota" equally, "balanced" so that the busiest rank has least.
    ``rebalance_interval``: steps between looks at whether other replica counts would pay, sooner where loads jump;
    null: never.
    ``rebalance_min_gain``: part of the training time that moving must save, after its own cost, to be done.
    """

    slots_per_rank: int | None = None
    min_replicas: int = 2
    max_imbalance: float | None = None
    max_tokens_per_expert_chunk: int | None = None
    split: Literal["quota", "balanced"] = "quota"
    rebalance_interval: int | None = 200
    rebalance_min_gain: float = 0.05

    def __post_init__(self) -> None:
        names = ("slots_per_rank", "min_replicas", "max_tokens_per_expert_chunk", "rebalance_interval")
        _at_least(1, "experts", self, *names)
        if self.max_imbalance is not None and not self.max_imbalance >= 1:
            raise ConfigError(
                f'"lazarus.experts.max_imbalance" is {self.max_imbalance}; it must be at least 1, or null'
            )
        if not 0 <= self.rebalance_min_gain < 1:
            raise ConfigError(
                f'"lazarus.experts.rebalance_min_gain" is {self.rebalance_min_gain}; it must be at least 0 and below 1'
            )


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradients are not usable.

    ``on_nonfinite``: "skip" leaves the model as it is, counts and logs the step; "stop" raises.
    ``on_spike``: the same for a finite loss above ``spike_factor`` x the mean of the last ``spike_window`` committed
    losses; "ignore" (default) does not look.
    ``max_consecutive_skips``: more skipped steps in a row than this stop the run.
    """

    on_nonfinite: Literal["skip", "stop"] = "skip"
    on_spike: Literal["ignore", "skip", "stop"] = "ignore"
    spike_factor: float = 3.0
    spike_window: int = 50
    max_consecutive_skips: int = 20

    def __post_init__(self) -> None:
        _at_least(1, "guard", self, "spike_window", "max_consecutive_skips")
        if self.spike_factor <= 1:
            raise ConfigError(f'"lazarus.guard.spike_factor" is {self.spike_factor}; it must be above 1')


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints that are written while training goes on; without this section a save returns when it is complete.

    ``persist_experts``: experts of every MoE layer that a save writes, in turn; "all": every save is a full one.
    ``selection``: whose turn it is: those not saved for longest, or ("load_aware") with most tokens since their save.
    ``content``: "all" writes nothing of the others; "moments" writes every expert's weights, and of the chosen ones the
    optimizer state.
    ``max_lost_token_fraction``: what may be lost of the planned run's token updates of experts, 0..1.
    ``dynamic_k``: write more experts when that could be exceeded, and fewer again when there is room.
    ``keep_last``: checkpoints that stay, with all files they refer to; null: all.
    ``strict``: true makes a save that fails stop the run.
    """

    persist_experts: int | Literal["all"] = "all"
    selection: Literal["sequential", "load_aware"] = "sequential"
    content: Literal["all", "moments"] = "all"
    max_lost_token_fraction: float = 0.0375
    dynamic_k: bool = True
    keep_last: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.persist_experts != "all":
            _at_least(1, "checkpoint", self, "persist_experts")
        _at_least(1, "checkpoint", self, "keep_last")
        if not 0 <= self.max_lost_token_fraction <= 1:
            raise ConfigError(
                f'"lazarus.checkpoint.max_lost_token_fraction" is {self.max_lost_token_fraction}; it must be 0 to 1'
            )


@dataclass(frozen=True)
class LazarusConfig:
    """The whole section. ``enabled``: false leaves DeepSpeed untouched. ``checkpoint``: null is as if left out."""

    enabled: bool = True
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    checkpoint: CheckpointConfig | None = None

    @classmethod
    def from_json(cls, section: object) -> LazarusConfig:
        """Parse the value of ``"lazarus"``; unknown keys and wrong types raise ConfigError."""
        return _parse(cls, section, "lazarus")


def load_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config as a new dict, from a dict or a JSON file."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        with open(config, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        raise ConfigError(f"DeepSpeed config {os.fspath(config)!r} does not exist") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"DeepSpeed config {os.fspath(config)!r} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"DeepSpeed config {os.fspath(config)!r} holds a {type(data).__name__}; it must be an object")
    return data


@dataclass(frozen=True)
class BatchSizes:
    """A global batch of ``micro_batches`` micro-batches of ``micro_batch_size`` samples each."""

    micro_batch_size: int
    micro_batches: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches


def batch_sizes(config: Mapping[str, Any], world_size: int) -> BatchSizes:
    """Global and micro-batch of a DeepSpeed config.

    Unlike in DeepSpeed the global batch need not be a multiple of the ranks: ranks take unequal shares of it.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        value = config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f'"{name}" is {value!r}; it must be an integer of at least 1')
    total, micro, steps = (config.get(name) for name in names)
    if total is None:
        if micro is None:
            raise ConfigError('give "train_batch_size" or "train_micro_batch_size_per_gpu"; both are missing')
        return BatchSizes(micro, (steps or 1) * world_size)
    if micro is None:
        micro, rest = divmod(total, (steps or 1) * world_size)
        if rest or not micro:
            raise ConfigError(
                f'"train_batch_size" is {total}; without "train_micro_batch_size_per_gpu" it must be a multiple of '
                f"gradient_accumulation_steps * ranks = {steps or 1} * {world_size}"
            )
    if total % micro:
        raise ConfigError(
            f'"train_batch_size" is {total}; it must be a multiple of "train_micro_batch_size_per_gpu" = {micro}'
        )
    if steps is not None and total != micro * steps * world_size:
        raise ConfigError(
            f'"train_batch_size" is {total}, but "train_micro_batch_size_per_gpu" * "gradient_accumulation_steps" * '
            f"ranks = {micro} * {steps} * {world_size} = {micro * steps * world_size}; leave "
            '"gradient_accumulation_steps" out to share any global batch over any number of ranks'
        )
    return BatchSizes(micro, total // micro)


def slots_per_rank(config: ExpertsConfig, num_experts: int, world_size: int) -> int:
    """Slots to give every rank; raises ConfigError if the configured number cannot hold every expert once."""
    least = math.ceil(num_experts / world_size)
    if config.slots_per_rank is None:
        return math.ceil(num_experts * min(config.min_replicas, world_size) / world_size)
    if config.slots_per_rank < least:
        raise ConfigError(
            f'"lazarus.experts.slots_per_rank" is {config.slots_per_rank}: {world_size} ranks x '
            f"{config.slots_per_rank} slots cannot hold {num_experts} experts; the least legal value is {least}"
        )
    return config.slots_per_rank


_SUPPORTED_OPTIMIZERS = ("Adam", "AdamW", "SGD")


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for DeepSpeed features that cannot work with the plugin, naming the key."""

    def enabled(key: str) -> bool:
        section = config.get(key)
        return bool(section.get("enabled", True)) if isinstance(section, Mapping) else bool(section)

    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage != 0:
        raise ConfigError(f'"zero_optimization.stage" is {stage}; only stage 0 is supported with "lazarus"')
    if isinstance(config.get("fp16"), Mapping) and config["fp16"].get("enabled"):
        raise ConfigError('"fp16.enabled" is true; use "bf16" or float32 with "lazarus"')
    for key, reason in (
        ("expert_parallel", "experts are placed by lazarus, not by AutoEP"),
        ("elasticity", "DeepSpeed's elasticity is gone; lazarus is elastic itself"),
        ("amp", "use bf16"),
        ("hybrid_engine", "it replaces the training engine"),
    ):
        if enabled(key):
            raise ConfigError(f'"{key}" is not supported with "lazarus" ({reason}); remove it')
    tensor = config.get("tensor_parallel") or {}
    if (tensor.get("autotp_size") or 0) > 1 or (tensor.get("tp_size") or 0) > 1:
        raise ConfigError(f'"tensor_parallel" is {tensor!r}; tensor parallelism is not supported with "lazarus"')
    if (pipeline := config.get("pipeline")) and pipeline.get("stages", 1) not in (1, "auto"):
        raise ConfigError(f'"pipeline.stages" is {pipeline["stages"]}; pipeline parallelism is not supported')
    if config.get("sequence_parallel_size", 1) != 1:
        raise ConfigError(f'"sequence_parallel_size" is {config["sequence_parallel_size"]}; it must be 1')
    if config.get("managed_gradient_accumulation", True) is not True:
        raise ConfigError('"managed_gradient_accumulation" is false; lazarus sets the boundary itself: remove the key')
    name = (config.get("optimizer") or {}).get("type")
    if name is not None and name.lower() not in {known.lower() for known in _SUPPORTED_OPTIMIZERS}:
        raise ConfigError(
            f'"optimizer.type" is {name!r}; expert records support {", ".join(map(repr, _SUPPORTED_OPTIMIZERS))}'
        )


def _at_least(least: int, section: str, values: Any, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and value < least:
            raise ConfigError(f'"lazarus.{section}.{name}" is {value}; it must be at least {least}')


def _parse(cls: type[_Section], value: object, path: str) -> _Section:
    if not isinstance(value, Mapping):
        raise ConfigError(f'"{path}" is {value!r}; it must be an object')
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, item in value.items():
        if key not in fields:
            raise ConfigError(f'unknown key "{path}.{key}"; legal keys are {", ".join(sorted(fields))}')
        hint = hints[key]
        section = next((one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)), None)
        if section is not None and (item is not None or section is hint):
            arguments[key] = _parse(typing.cast(type, section), item, f"{path}.{key}")
        else:
            _check_type(hint, item, f"{path}.{key}")
            arguments[key] = item
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_type(hint: Any, value: object, path: str) -> None:
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f'"{path}" is {value!r}; legal values are {", ".join(map(repr, typing.get_args(hint)))}')
        return
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    literals = [value for option in options for value in typing.get_args(option)]
    options = tuple(option for option in options if not typing.get_args(option))
    if isinstance(value, str) and value in literals:
        return
    for option in options:
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return
        if isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return
    legal = ["null" if option is type(None) else option.__name__ for option in options]
    names = " or ".join([*legal, *map(repr, literals)])
    raise ConfigError(f'"{path}" is {value!r}; it must be {names}')
