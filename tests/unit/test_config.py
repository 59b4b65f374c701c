"""Wrong configurations: one clear error each, before any process group exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_lazarus
from megatron_lazarus.config import BatchSizes, ConfigError, LazarusConfig, batch_sizes
from megatron_lazarus.moe.layer import MoELayer

BASE: dict[str, Any] = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "lazarus": {}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(8, nn.Linear(8, 8), 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lazarus": {"expert": {}}}, r'unknown key "lazarus\.expert"; legal keys are .*experts'),
        (
            {"lazarus": {"experts": {"slots": 2}}},
            r'unknown key "lazarus\.experts\.slots"; legal keys are .*slots_per_rank',
        ),
        (
            {"lazarus": {"experts": {"slots_per_rank": "2"}}},
            r'"lazarus\.experts\.slots_per_rank" is \'2\'; it must be int',
        ),
        ({"lazarus": {"experts": {"slots_per_rank": True}}}, r"it must be int or null"),
        (
            {"lazarus": {"experts": {"min_replicas": 0}}},
            r'"lazarus\.experts\.min_replicas" is 0; it must be at least 1',
        ),
        ({"lazarus": {"guard": {"on_nonfinite": "pray"}}}, r"is 'pray'; legal values are 'skip', 'stop'"),
        ({"lazarus": {"guard": {"spike_factor": 1}}}, r'"lazarus\.guard\.spike_factor" is 1; it must be above 1'),
        (
            {"lazarus": {"checkpoint": {"persist_experts": "most"}}},
            r"\"lazarus\.checkpoint\.persist_experts\" is 'most'; it must be int or 'all'",
        ),
        (
            {"lazarus": {"checkpoint": {"persist_experts": 0}}},
            r'"lazarus\.checkpoint\.persist_experts" is 0; it must be at least 1',
        ),
        (
            {"lazarus": {"checkpoint": {"max_lost_token_fraction": 1.5}}},
            r'"lazarus\.checkpoint\.max_lost_token_fraction" is 1\.5; it must be 0 to 1',
        ),
        ({"lazarus": {"checkpoint": {"content": "some"}}}, r"is 'some'; legal values are 'all', 'moments'"),
        (
            {"lazarus": {"checkpoint": {"keep": 1}}},
            r'unknown key "lazarus\.checkpoint\.keep"; legal keys are .*keep_last',
        ),
        ({"lazarus": {"checkpoint": 3}}, r'"lazarus\.checkpoint" is 3; it must be an object'),
        ({"lazarus": []}, r'"lazarus" is \[\]; it must be an object'),
        ({"lazarus": {"enabled": False}}, r'"lazarus\.enabled" is false'),
        (
            {"lazarus": {"experts": {"slots_per_rank": 1}}},
            r"2 ranks x 1 slots cannot hold 6 experts; the least legal value is 3",
        ),
        ({"zero_optimization": {"stage": 1}}, r'"zero_optimization\.stage" is 1'),
        ({"zero_optimization": {"stage": 2}}, r'"zero_optimization\.stage" is 2'),
        ({"zero_optimization": {"stage": 3}}, r'"zero_optimization\.stage" is 3'),
        ({"fp16": {"enabled": True}}, r'"fp16\.enabled" is true'),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, r'"expert_parallel" is not supported'),
        ({"elasticity": {"enabled": True}}, r'"elasticity" is not supported'),
        ({"tensor_parallel": {"autotp_size": 2}}, r'"tensor_parallel" is'),
        ({"pipeline": {"stages": 2}}, r'"pipeline\.stages" is 2'),
        ({"optimizer": {"type": "Lion"}}, r'"optimizer\.type" is \'Lion\'; expert records support \'Adam\''),
        ({"managed_gradient_accumulation": False}, r'"managed_gradient_accumulation" is false'),
        ({"train_batch_size": 5}, r'"train_batch_size" is 5; it must be a multiple of .* = 2'),
        ({"gradient_accumulation_steps": 3}, r"2 \* 3 \* 2 = 12"),
        ({"train_micro_batch_size_per_gpu": 0}, r'"train_micro_batch_size_per_gpu" is 0'),
    ],
)
def test_one_clear_error(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=message):
        megatron_lazarus.initialize(model=Model(), config={**BASE, **change})
    assert not dist.is_initialized()


def test_top_k_above_expert_count() -> None:
    with pytest.raises(ValueError, match=r"k \(top-k\) is 7; with num_experts=6"):
        MoELayer(8, nn.Linear(8, 8), 6, k=7)


def test_unknown_client_optimizer() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"RMSprop is not supported for experts"):
        megatron_lazarus.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config=BASE)
    assert not dist.is_initialized()


def test_missing_config_file() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.json' does not exist"):
        megatron_lazarus.initialize(model=Model(), config="nowhere.json")


def test_pipeline_module_and_model_parallel_mpu() -> None:
    class PipelineModule(Model):
        pass

    class Mpu:
        def get_tensor_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match="PipelineModule"):
        megatron_lazarus.initialize(model=PipelineModule(), config=BASE)
    with pytest.raises(ConfigError, match="tensor_model_parallel size of 2"):
        megatron_lazarus.initialize(model=Model(), mpu=Mpu(), config=BASE)


@pytest.mark.parametrize(
    ("config", "world", "expected"),
    [
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1}, 5, BatchSizes(1, 12)),
        ({"train_micro_batch_size_per_gpu": 2}, 3, BatchSizes(2, 3)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 3, BatchSizes(2, 12)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 4}, 3, BatchSizes(2, 12)),
        ({"train_batch_size": 6}, 3, BatchSizes(2, 3)),
    ],
)
def test_batch_sizes(config: dict[str, int], world: int, expected: BatchSizes) -> None:
    assert batch_sizes(config, world) == expected


def test_defaults_and_nesting() -> None:
    config = LazarusConfig.from_json({"experts": {"slots_per_rank": 6}, "guard": {"on_spike": "stop"}})
    assert config.enabled
    assert config.experts.slots_per_rank == 6
    assert config.experts.min_replicas == 2
    assert config.guard.on_spike == "stop"
