"""Record layout, and the experts whose parameters are views into it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lazarus.moe.experts import Experts
from megatron_lazarus.moe.records import PARAMETER, RecordBuffer, RecordLayout, TensorSpec

STATE = ("exp_avg", "exp_avg_sq")


def _layout(dtype: torch.dtype = torch.float32) -> RecordLayout:
    specs = (TensorSpec("a.weight", (3, 5), 0), TensorSpec("a.bias", (3,), 1), TensorSpec("b.weight", (2, 3), 0))
    return RecordLayout(specs, dtype, STATE)


@pytest.mark.parametrize(("dtype", "per_parameter"), [(torch.float32, 12), (torch.float64, 24), (torch.bfloat16, 14)])
def test_bytes(dtype: torch.dtype, per_parameter: int) -> None:
    layout = _layout(dtype)
    assert layout.numel == 24
    assert layout.nbytes % 256 == 0
    assert layout.nbytes >= 24 * per_parameter + 4
    assert layout.nbytes < 24 * per_parameter + 4 + 64 * 6 + 256
    assert all(offset % 64 == 0 for offset in layout.offsets.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fields_do_not_overlap(dtype: torch.dtype) -> None:
    buffer = RecordBuffer(_layout(dtype), [4, 1], torch.device("cpu"))
    names = buffer.layout.field_names
    for number, name in enumerate(names):
        buffer.field(name).fill_(number + 1)
    for number, name in enumerate(names):
        assert (buffer.field(name) == number + 1).all()
    tensors = buffer.named_tensors(1)
    assert tensors["parameter/a.weight"].shape == (3, 5)
    tensors["exp_avg/a.bias"].fill_(7.0)
    assert (
        buffer.field("exp_avg")[1].tolist()
        == [2.0 + ("master" in names)] * 15 + [7.0] * 3 + [2.0 + ("master" in names)] * 6
    )


def test_segments_are_runs_of_one_option_group() -> None:
    assert _layout().segments() == [(0, 0, 15), (1, 15, 18), (0, 18, 24)]
    frozen = RecordLayout(
        (TensorSpec("a", (4,), None), TensorSpec("b", (2,), 0), TensorSpec("c", (3,), 0)), torch.float32, ()
    )
    assert frozen.segments() == [(0, 4, 9)]


def _experts() -> tuple[Experts, RecordBuffer]:
    torch.manual_seed(0)
    experts = Experts(lambda index: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)), 3)
    layout = experts.layout({"0.weight": 0, "0.bias": 1, "2.weight": 0, "2.bias": 1}, STATE)
    experts.detach()
    buffer = RecordBuffer(layout, [2, 0, 2], torch.device("cpu"))
    for slot, expert in enumerate(buffer.experts):
        buffer.rows[slot] = experts.initial_record(layout, expert, buffer.rows.device).rows[0]
    experts.bind(buffer)
    return experts, buffer


def test_parameters_and_gradients_are_views_of_the_rows() -> None:
    experts, buffer = _experts()
    assert not list(experts.parameters()), "loops over module.parameters() must not meet them"
    rows = torch.randn(5, 4)
    before = experts(rows, [3, 0, 2])
    buffer.field(PARAMETER)[1].mul_(2.0)
    after = experts(rows, [3, 0, 2])
    assert not torch.allclose(before[:3], after[:3])
    assert torch.equal(before[3:], after[3:])
    after.sum().backward()
    after_again = experts(rows, [3, 0, 2])
    once = buffer.gradients.clone()
    after_again.sum().backward()
    assert torch.allclose(buffer.gradients, 2 * once), "gradients accumulate in place"
    assert once[0].any()
    assert once[1].any()
    assert not once[2].any(), "a second replica on the rank computes nothing"


def test_state_dict_names_experts_globally_and_loads_back() -> None:
    experts, buffer = _experts()
    state = experts.state_dict()
    assert sorted({key.split(".")[1] for key in state}) == ["0", "2"]
    changed = {key: torch.full_like(value, 3.0) for key, value in state.items()}
    changed["deepspeed_experts.1.0.weight"] = torch.zeros(6, 4)
    experts.load_state_dict(changed)
    assert (buffer.field(PARAMETER) == 3.0).all()
    with pytest.raises(RuntimeError, match=r"Missing key.*deepspeed_experts\.0\.0\.weight"):
        experts.load_state_dict({key: value for key, value in changed.items() if ".0.0.weight" not in key})
    experts.context.export_experts = False
    assert not experts.state_dict()


def test_conversion_after_binding_is_refused() -> None:
    experts, _ = _experts()
    experts.float()
    experts.to("cpu")
    with pytest.raises(RuntimeError, match=r"before megatron_lazarus\.initialize"):
        experts.double()


def test_train_reaches_detached_experts() -> None:
    experts, _ = _experts()
    experts.eval()
    assert not any(module.training for module in experts._modules_here())


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), r"'1' has dropout p=0\.1"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), r"'1' is a BatchNorm1d: .* use LayerNorm"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()), "mixes parameter types"),
    ],
)
def test_experts_that_records_cannot_hold(expert: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experts(expert, 2)


class Scaled(nn.Module):
    """Buffers of several types; one of them counts if it is asked to."""

    def __init__(self, index: int, shift: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("order", torch.randperm(4))
        self.register_buffer("scale", torch.full((3,), float(index + 1)))
        self.register_buffer("shift", torch.tensor(shift), persistent=False)
        self.how = "not at all"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.scale.add_(1.0)
        elif self.how == "by assignment":
            self.scale = self.scale + 1.0
        result: torch.Tensor = self.linear(rows)[:, self.order] * self.scale[0] + self.shift
        return result


def test_buffers_live_in_records() -> None:
    torch.manual_seed(3)
    experts = Experts(Scaled, 3)
    own = [{k: v.clone() for k, v in module.state_dict().items()} for module in experts.deepspeed_experts]
    rows = torch.randn(6, 4)
    before = experts(rows, [2, 1, 3])
    layout = experts.layout({"linear.weight": 0, "linear.bias": 0}, STATE)
    assert [spec.name for spec in layout.buffers] == ["order", "scale"]
    experts.detach()
    buffer = RecordBuffer(layout, (2, 0, 1), torch.device("cpu"))
    for slot, expert in enumerate(buffer.experts):
        buffer.rows[slot] = experts.initial_record(layout, expert, buffer.rows.device).rows[0]
    experts.bind(buffer)
    assert torch.equal(torch.cat([experts(rows, [2, 1, 3])]), before)
    state = experts.state_dict()
    for expert in range(3):
        for name, value in own[expert].items():
            assert torch.equal(state[f"deepspeed_experts.{expert}.{name}"], value), name
    assert len(state) == 3 * 4
    # The row is all there is of an expert: moved bytes take the buffers along.
    buffer.rows[0] = buffer.rows[1]
    assert torch.equal(buffer.buffer_views(0)["order"], own[0]["order"])
    assert torch.equal(experts(rows, [0, 0, 6]), experts(rows, [6, 0, 0]))


@pytest.mark.parametrize("how", ["in place", "by assignment"])
def test_buffers_that_change_are_refused(how: str) -> None:
    experts = Experts(Scaled, 2)
    experts(torch.randn(2, 4), [1, 1])
    experts.deepspeed_experts[1].how = how
    with pytest.raises(RuntimeError, match="changes its buffer 'scale' when it computes"):
        experts(torch.randn(2, 4), [1, 1])


def test_buffers_outside_of_the_state_must_be_alike() -> None:
    experts = Experts(lambda index: Scaled(index, shift=float(index)), 2)
    with pytest.raises(ValueError, match="experts differ in their buffer 'shift'"):
        experts.layout({}, STATE)


def test_predicted_activation_bytes() -> None:
    """Linear 4->6, GELU, Linear 6->4 in float32 save their inputs: 4 + 6 + 6 floats a row, of which 4 are the row."""
    from megatron_lazarus.moe.communication import Communicator
    from megatron_lazarus.moe.layer import MoELayer

    layer = MoELayer(4, nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)), 3, k=2)
    assert layer.experts_row_bytes() == (4 * 16, 48)
    layer.bind_placement(np.ones((3, 5), dtype=np.int64), 0, np.zeros(5, dtype=np.int64), Communicator())
    assert layer.peak_activation_bytes(10) == (20 * (64 + 48), 100 * (64 + 48))
    layer.experts.max_tokens_per_chunk = 7
    assert layer.peak_activation_bytes(10) == (20 * 64 + 7 * 48, 100 * 64 + 7 * 48)
