"""The model: positions, attention, recomputation, precision, initial weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_lazarus.models.attention import DeviceRotaryEmbedding, SDPACoreAttention
from megatron_lazarus.models.experts import ExpertFactory
from megatron_lazarus.models.gpt import GPTConfig, PretrainGPT
from megatron_lazarus.models.megatron import AttnMaskType, TransformerConfig
from megatron_lazarus.models.parallel_state import SoloGroup

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore:full scope is deprecated")]


def config(**changes: Any) -> GPTConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "num_experts": 4,
        "topk": 2,
        "moe_loss_coeff": 0.01,
        "moe_drop_tokens": False,
        "moe_top2_2nd_expert_sampling": False,
    }
    return GPTConfig(**{**sizes, **changes})


def batch(seed: int = 0, sequence: int = 16) -> dict[str, torch.Tensor]:
    text = torch.randint(0, 96, (3, sequence + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(3, sequence)}


def loss_and_gradients(model: PretrainGPT, seed: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    loss, _ = model(**batch())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_starts_at_the_loss_of_a_uniform_guess(position: str, dtype: torch.dtype) -> None:
    model = PretrainGPT(config(position_embedding_type=position, hidden_dropout=0.0, attention_dropout=0.0)).to(dtype)
    loss, metrics = model(**batch())
    loss.backward()
    assert loss.item() == pytest.approx(math.log(96), rel=0.05)
    assert metrics["lm loss"] == loss.detach()
    # Balanced routing has an auxiliary loss of about 1, scaled by the coefficient.
    assert 0.005 < metrics["moe loss"].item() < 0.05
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
def test_positions_matter_and_the_future_does_not(position: str) -> None:
    model = PretrainGPT(config(position_embedding_type=position)).double().eval()
    tokens = batch()["tokens"]
    positions = torch.arange(16).expand_as(tokens)
    logits = model.gpt(tokens, positions, attention_mask=None)
    swapped = tokens.clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    assert (model.gpt(swapped, positions, attention_mask=None)[:, -1] - logits[:, -1]).abs().max() > 1e-9
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 96
    torch.testing.assert_close(model.gpt(changed, positions, attention_mask=None)[:, :8], logits[:, :8])


def test_rope_angles_and_device() -> None:
    rotary = DeviceRotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=SoloGroup())
    angles = rotary.bfloat16()(5)
    expected = torch.outer(torch.arange(5.0), 10000 ** (-torch.arange(0, 8, 2) / 8))
    assert angles.dtype == torch.float32
    torch.testing.assert_close(angles[:, 0, 0], torch.cat((expected, expected), dim=-1))
    assert rotary.to("meta")(5).device.type == "meta"


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_the_formula(groups: int, masked: bool) -> None:
    settings = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = SDPACoreAttention(settings, 1, AttnMaskType.causal, "self")
    torch.manual_seed(0)
    query = torch.randn(10, 3, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 10, 3, groups, 8, dtype=torch.float64)
    mask = torch.rand(3, 1, 10, 10) < 0.4 if masked else None
    if mask is not None:
        mask.diagonal(dim1=-2, dim2=-1).fill_(False)
    result = attention(query, key, value, mask)

    key, value = (tensor.repeat_interleave(4 // groups, dim=2) for tensor in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(8)
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1) if mask is None else mask
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    expected = torch.einsum("bhst,tbhd->sbhd", weights, value).reshape(10, 3, 32)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_attention_dropout_follows_the_default_generator_and_the_mode() -> None:
    settings = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.5)
    attention = SDPACoreAttention(settings, 1, AttnMaskType.causal, "self")
    query, key, value = torch.randn(3, 10, 3, 4, 8)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention(query, key, value)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    attention.eval()
    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute: str, dtype: torch.dtype) -> None:
    plain = PretrainGPT(config()).to(dtype)
    again = PretrainGPT(config(recompute=recompute)).to(dtype)
    again.load_state_dict(plain.state_dict())
    loss, gradients = loss_and_gradients(plain)
    loss_again, gradients_again = loss_and_gradients(again)
    assert torch.equal(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


def test_full_recomputation_keeps_less() -> None:
    def saved(recompute: str | None) -> int:
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        model = PretrainGPT(config(recompute=recompute, num_layers=4))
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(**batch())
        return total

    assert saved("full") < saved(None) / 2


def test_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = PretrainGPT(config()).state_dict()
    state = torch.random.get_rng_state()
    second = PretrainGPT(config()).state_dict()
    other = PretrainGPT(config(seed=99)).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], value) for name, value in second.items() if torch.is_tensor(value))
    name = "gpt.embedding.word_embeddings.weight"
    assert not torch.equal(first[name], other[name])


def test_experts_differ_by_seed_layer_and_index() -> None:
    def weight(seed: int, layer: int, index: int) -> torch.Tensor:
        return ExpertFactory(8, 16, False, 0.02, 0.01, seed, layer)(index).fc1.weight

    keys = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 0, 1), (0, 1, -1)]
    weights = [weight(*key) for key in keys]
    assert all(torch.equal(weight(*key), value) for key, value in zip(keys, weights, strict=True))
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_expert_interval_places_the_layers() -> None:
    assert config(num_layers=6).moe_layer_numbers == (2, 4, 6)
    assert config(num_layers=6, expert_interval=3).moe_layer_numbers == (3, 6)
    assert config(num_experts=1).moe_layer_numbers == ()
    model = PretrainGPT(config(num_layers=2, num_experts=1))
    assert set(model(**batch())[1]) == {"lm loss"}


@pytest.mark.parametrize(
    "changes",
    [
        {"swiglu": True, "normalization": "RMSNorm", "num_query_groups": 2},
        {"mlp_type": "residual"},
        {"untie_embeddings_and_output_weights": True, "rotary_percent": 0.5, "position_embedding_type": "rope"},
        {"moe_router": "sigmoid", "moe_router_bias_update_rate": 1e-3, "moe_z_loss_coeff": 1e-3},
        {"topk": 1, "moe_drop_tokens": True},
    ],
)
def test_variants_train(changes: dict[str, Any]) -> None:
    model = PretrainGPT(config(hidden_dropout=0.0, attention_dropout=0.0, **changes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss, _ = model(**batch())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5


def test_loss_mask_weighs_tokens() -> None:
    model = PretrainGPT(config()).double().eval()
    inputs = batch()
    inputs["loss_mask"] = torch.zeros(3, 16)
    assert model(**inputs)[0].item() == 0.0
    inputs["loss_mask"][1, 4:7] = 1.0
    masked, _ = model(**inputs)
    logits = model.gpt(inputs["tokens"], torch.arange(16).expand(3, 16), attention_mask=None)
    expected = torch.nn.functional.cross_entropy(logits[1, 4:7], inputs["labels"][1, 4:7])
    torch.testing.assert_close(masked, expected)


def test_needs_a_process_group() -> None:
    torch.distributed.destroy_process_group()
    try:
        with pytest.raises(RuntimeError, match="initialised"):
            PretrainGPT(config())
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
