"""Telling that a checkpoint is of another model before any process starts to talk to another."""

from __future__ import annotations

import os
from typing import Any

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.manifest import Manifest, read_latest, tags
from megatron_lazarus.models.gpt import GPTConfig


def check_checkpoint(folder: str, config: GPTConfig) -> None:
    """Raise CheckpointError, naming option and both values, if the latest checkpoint is of another model.

    A folder without a checkpoint is fine. The engine compares every tensor when it loads; this finds what an option
    explains.
    """
    tag, manifest = read_latest(folder), None
    for name in [tag, *tags(folder)] if tag is not None else []:
        try:
            tag, manifest = name, Manifest.read(os.path.join(folder, name))
            break
        except CheckpointError as error:
            # Loading says so too, and takes an older one.
            damage = error
    if tag is None:
        return
    if manifest is None:
        raise damage
    saved = _facts(manifest.model)
    for option, here in _expected(config).items():
        if option in saved and saved[option] != here:
            raise CheckpointError(
                f"checkpoint {os.path.join(folder, tag)} is of another model: {option} is {saved[option]} there and "
                f"{here} here"
            )


def _facts(model: dict[str, Any]) -> dict[str, Any]:
    dense: dict[str, list[int]] = model["dense"]
    embedding = dense.get("gpt.embedding.word_embeddings.weight")
    if embedding is None:
        return {"the model": "not a GPT of pretrain_gpt"}
    moe_layers = model["moe_layers"]
    positions = dense.get("gpt.embedding.position_embeddings.weight")
    return {
        "--hidden-size": embedding[1],
        "the padded vocabulary": embedding[0],
        "--num-layers": sum(name.endswith(".self_attention.linear_qkv.weight") for name in dense),
        "--max-position-embeddings (learned)": positions and positions[0],
        "the number of MoE layers (--expert-interval)": len(moe_layers),
        "--num-experts": sorted({layer["num_experts"] for layer in moe_layers}),
        "--ffn-hidden-size of experts": sorted({layer["tensors"]["fc2.weight"][1] for layer in moe_layers}),
    }


def _expected(config: GPTConfig) -> dict[str, Any]:
    learned = config.position_embedding_type == "learned_absolute"
    moe = bool(config.moe_layer_numbers)
    return {
        "the model": "a GPT of pretrain_gpt",
        "--hidden-size": config.hidden_size,
        "the padded vocabulary": config.vocab_size,
        "--num-layers": config.num_layers,
        "--max-position-embeddings (learned)": config.max_position_embeddings if learned else None,
        "the number of MoE layers (--expert-interval)": len(config.moe_layer_numbers),
        "--num-experts": [config.num_experts] if moe else [],
        "--ffn-hidden-size of experts": [config.expert_ffn_hidden_size] if moe else [],
    }
