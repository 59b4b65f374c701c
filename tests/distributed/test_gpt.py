"""The real model: GPT from Megatron Core with experts, on an engine, at any world size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_lazarus.models.gpt import GPTConfig, PretrainGPT
from tests.distributed.pool import Pools
from tests.distributed.runs import assert_replicas_equal, relative

CONFIG = GPTConfig(
    vocab_size=64,
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=16,
    num_experts=6,
    topk=2,
    moe_drop_tokens=False,
    moe_top2_2nd_expert_sampling=True,
    moe_loss_coeff=0.01,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
MICRO_BATCHES = 6


def _data(step: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    text = torch.randint(0, 64, (2, 17), generator=generator)
    text[:, 1:] = (text[:, :1] + torch.arange(1, 17) * 3) % 64
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(2, 16)}


def pretrain(rank: int, world: int, configs: list[GPTConfig], steps: int) -> list[tuple[list[float], list[float]]]:
    """(losses, gradient norms) of each config, in float64."""
    import megatron_lazarus

    histories = []
    for config in configs:
        model = PretrainGPT(config).double()
        ds_config: dict[str, Any] = {
            "train_batch_size": 2 * MICRO_BATCHES,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 5}},
        }
        engine, *_ = megatron_lazarus.initialize(model=model, config=ds_config, seed=3)
        results = [engine.train_batch(_data) for _ in range(steps)]
        evaluated = engine.eval_batch(_data, 5)["lm loss"]
        assert_replicas_equal(engine)
        histories.append(([result.loss for result in results] + [evaluated], [result.grad_norm for result in results]))
    return histories


def test_gpt_at_any_world_size_with_and_without_recomputation(workers: Pools) -> None:
    rope = dataclasses.replace(CONFIG, position_embedding_type="rope", swiglu=True, mlp_type="residual")
    configs = [CONFIG, dataclasses.replace(CONFIG, recompute="full"), rope]
    alone = workers(1)(pretrain, configs, 8, timeout=120)[0]
    for losses, norms in alone:
        assert losses[7] < losses[0]
        assert max(norms) > 0
    assert alone[0] == alone[1], "recomputation repeats the same draws and routes"
    for world in (3, 4):
        for (losses, norms), (expected_losses, expected_norms) in zip(
            workers(world)(pretrain, configs, 8, timeout=240)[0], alone, strict=True
        ):
            assert relative(losses, expected_losses) < 1e-9
            assert relative(norms, expected_norms) < 1e-9
