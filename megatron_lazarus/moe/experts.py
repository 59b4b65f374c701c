"""The experts of one layer: ordinary registered modules until the engine moves them into records."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from megatron_lazarus.moe.context import StepContext
from megatron_lazarus.moe.records import MASTER, PARAMETER, BufferSpec, RecordBuffer, RecordLayout, TensorSpec


class _Unregistered:
    """Holds modules out of nn.Module's sight, so that loops over ``parameters()`` do not meet them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules


class Experts(nn.Module):
    """The experts as ``deepspeed_experts.<id>`` (DeepSpeed's name) before ``detach``; this rank's replicas after.

    ``constructed``: how many a rank constructs, default all; expert e begins as number e modulo ``constructed`` of the
    rank that the layer chooses. ``leading_dimensions`` of size 1 stand before the rows that an expert is given.
    """

    def __init__(
        self, expert: nn.Module | Callable[[int], nn.Module], num_experts: int, constructed: int | None = None
    ) -> None:
        super().__init__()
        count = num_experts if constructed is None else constructed
        if isinstance(expert, nn.Module):
            modules: list[nn.Module] = [copy.deepcopy(expert) for _ in range(count)]
        else:
            modules = [expert(index) for index in range(count)]
        self.num_experts, self.constructed = num_experts, count
        self.deepspeed_experts = nn.ModuleList(modules)
        self.context = StepContext()
        self.max_tokens_per_chunk: int | None = None
        self.buffer: RecordBuffer | None = None
        self._detached: _Unregistered | None = None
        self._template: _Unregistered | None = None
        self._initial: _Unregistered | None = None
        self._ids = list(range(count))
        self.leading_dimensions: tuple[int, ...] = ()
        self._refuse_unsupported(modules[0])

    @staticmethod
    def _refuse_unsupported(module: nn.Module) -> None:
        for name, child in module.named_modules():
            if isinstance(child, _DropoutNd) and child.p > 0:
                raise ValueError(
                    f"expert module {name or type(module).__name__!r} has dropout p={child.p}: one expert call mixes "
                    "micro-batches, so its draws could not be repeated at another world size; set it to 0"
                )
            if isinstance(child, _NormBase):
                raise ValueError(
                    f"expert module {name or type(module).__name__!r} is a {type(child).__name__}: one expert call has "
                    "tokens of several ranks, whose statistics depend on the placement; use LayerNorm or RMSNorm"
                )
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if len(dtypes) > 1:
            raise ValueError(f"the expert mixes parameter types {sorted(map(str, dtypes))}; use one")

    @property
    def is_partial(self) -> bool:
        """Whether there are experts that neither this rank has constructed nor any other is known to have."""
        return self._detached is None and len(self._ids) < self.num_experts

    # -- life cycle ---------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take the modules out of the registry; ``to``, ``train`` and state dicts still reach them through here."""
        self._detached = self._initial = _Unregistered(list(self.deepspeed_experts))
        del self.deepspeed_experts

    def layout(self, option_groups: dict[str, int | None], state_names: tuple[str, ...]) -> RecordLayout:
        """The record layout of one expert: ``option_groups`` maps its parameters to client optimizer groups."""
        module = self._modules_here()[0]
        specs = tuple(
            TensorSpec(name, tuple(p.shape), option_groups.get(name)) for name, p in module.named_parameters()
        )
        constant = _constants(module)
        for other in self._modules_here()[1:]:
            if unequal := [name for name, value in _constants(other).items() if not torch.equal(value, constant[name])]:
                raise ValueError(
                    f"experts differ in their buffer {unequal[0]!r}, which is not persistent and so not part of their "
                    "state; register it with persistent=True"
                )
        buffers = tuple(
            BufferSpec(name, tuple(value.shape), value.dtype)
            for name, value in module.named_buffers()
            if name not in constant
        )
        return RecordLayout(specs, next(module.parameters()).dtype, state_names, buffers)

    def bind(self, buffer: RecordBuffer) -> None:
        """Make the modules' parameters views of ``buffer``'s rows, one module per slot. Values come from the rows."""
        if self._detached is None:
            raise RuntimeError("experts must be detached before they can live in records")
        if self._template is None:
            self._template = _Unregistered([_template_of(self._detached.modules[0])])
        template = self._template.modules[0]
        ranges = buffer.layout.ranges()
        flat = buffer.field(PARAMETER)
        modules = []
        for slot in range(len(buffer.experts)):
            module = _skeleton(template)
            memo: dict[int, nn.Parameter] = {}
            for tensor in buffer.layout.tensors:
                start, end = ranges[tensor.name]
                owner, leaf = _owner(template, tensor.name)
                parameter = nn.Parameter(
                    flat[slot, start:end].view(tensor.shape), requires_grad=tensor.option_group is not None
                )
                if parameter.requires_grad:
                    parameter.grad = buffer.gradients[slot, start:end].view(tensor.shape)
                memo[id(owner._parameters[leaf])] = parameter
            _replace(module, template, memo)
            for name, view in buffer.buffer_views(slot).items():
                owner, leaf = _owner(module, name)
                owner._buffers[leaf] = view
            modules.append(module)
        self._detached = _Unregistered(modules)
        self._ids = list(buffer.experts)
        self.buffer = buffer

    def initial_record(self, layout: RecordLayout, expert: int, device: torch.device) -> RecordBuffer:
        """A record of ``expert`` as the model's constructor left it. Raises RuntimeError after ``forget_initial``."""
        if self._initial is None:
            raise RuntimeError("the initial experts are gone: training has begun")
        module = self._initial.modules[expert % len(self._initial.modules)]
        tensors, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        buffer = RecordBuffer(layout, (expert,), device)
        flat = torch.cat([tensors[spec.name].detach().reshape(-1) for spec in layout.tensors])
        buffer.field(PARAMETER)[0] = flat
        if layout.has_master:
            buffer.field(MASTER)[0] = flat
        for name, view in buffer.buffer_views(0).items():
            view.copy_(buffers[name])
        return buffer

    def forget_initial(self) -> None:
        """Free what the model's constructor made; the records are all there is from now on."""
        self._initial = None

    # -- computation --------------------------------------------------------------------------------------------

    def forward(self, rows: Tensor, tokens_per_expert: list[int]) -> Tensor:
        """Apply expert e to the next ``tokens_per_expert[e]`` of ``rows`` [N, H]; returns [N, H]."""
        modules = self._computing_modules()
        constants = _versions(modules)
        outputs = []
        for expert, chunk in enumerate(rows.split(tokens_per_expert)):
            if chunk.shape[0]:
                outputs.append(self._apply_expert(modules[expert], chunk))
        if constants and (changed := constants ^ _versions(modules)):
            raise RuntimeError(
                f"an expert changes its buffer {sorted(name for name, *_ in changed)[0]!r} when it computes: every "
                "replica would change it differently; only constant buffers are supported"
            )
        if not outputs:
            # Stays attached to the graph, so that this rank's backward meets the same collectives as the others'.
            return rows
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _apply_expert(self, module: nn.Module, chunk: Tensor) -> Tensor:
        limit = self.max_tokens_per_chunk
        if limit is None or chunk.shape[0] <= limit:
            return self.run_one(module, chunk)
        if not torch.is_grad_enabled():
            return torch.cat([self.run_one(module, part) for part in chunk.split(limit)])
        parts: list[Any] = [checkpoint(self.run_one, module, part, use_reentrant=False) for part in chunk.split(limit)]
        return torch.cat(parts)

    def run_one(self, module: nn.Module, rows: Tensor) -> Tensor:
        """One expert on ``rows`` [N, H]; returns [N, H]."""
        output = module(rows.view(*self.leading_dimensions, *rows.shape))
        # Megatron's MLPs return (output, bias): DeepSpeed's experts ignore the second item too.
        return (output[0] if isinstance(output, tuple) else output).reshape(rows.shape)

    def _computing_modules(self) -> dict[int, nn.Module]:
        modules: dict[int, nn.Module] = {}
        for expert, module in zip(self._ids, self._modules_here(), strict=True):
            modules.setdefault(expert, module)
        return modules

    # -- nn.Module plumbing for modules outside the registry ----------------------------------------------------

    def _modules_here(self) -> list[nn.Module]:
        return self._detached.modules if self._detached is not None else list(self.deepspeed_experts)

    def local_parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """(expert, name, parameter) of every replica on this rank."""
        for expert, module in zip(self._ids, self._modules_here(), strict=True):
            for name, parameter in module.named_parameters():
                yield expert, name, parameter

    def local_state(self) -> Iterator[tuple[int, str, Tensor]]:
        """(expert, name, tensor) of what state dicts hold of every replica on this rank."""
        for expert, module in zip(self._ids, self._modules_here(), strict=True):
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    yield expert, name, tensor

    def train(self, mode: bool = True) -> Experts:
        super().train(mode)
        if self._detached is not None:
            for module in self._detached.modules:
                module.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)
        if self.buffer is not None:
            probe = torch.empty(0, dtype=self.buffer.layout.dtype, device=self.buffer.rows.device)
            if (moved := fn(probe)).dtype != probe.dtype or moved.device != probe.device:
                raise RuntimeError(
                    f"experts live in records of {probe.dtype} on {probe.device}: move or convert the model before "
                    "megatron_lazarus.initialize"
                )
        elif self._detached is not None:
            for module in self._detached.modules:
                module._apply(fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._detached is not None and self.context.export_experts:
            for expert, name, tensor in self.local_state():
                destination.setdefault(
                    f"{prefix}deepspeed_experts.{expert}.{name}", tensor if keep_vars else tensor.detach()
                )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Not strict: experts of other ranks are no surprise in a full state dict.
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, False, missing_keys, unexpected_keys, error_msgs
        )
        if self._detached is None or not self.context.export_experts:
            return
        for expert, name, tensor in self.local_state():
            key = f"{prefix}deepspeed_experts.{expert}.{name}"
            if key in state_dict:
                with torch.no_grad():
                    tensor.copy_(state_dict[key])
            elif strict:
                missing_keys.append(key)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are not persistent: every rank has constructed them itself."""
    names = {
        f"{path}.{leaf}" if path else leaf
        for path, owner in module.named_modules()
        for leaf in owner._non_persistent_buffers_set
    }
    return {name: value for name, value in module.named_buffers() if name in names}


def _versions(modules: dict[int, nn.Module]) -> set[tuple[str, int, int, int]]:
    """(name, expert, identity, version) of every buffer, by which it is seen whether one was changed."""
    return {
        (name, expert, id(value), value._version)
        for expert, module in modules.items()
        for name, value in module.named_buffers()
    }


def _template_of(module: nn.Module) -> nn.Module:
    """A copy without memory for parameters and for what records hold."""
    template = copy.deepcopy(module).to("meta")
    for name, value in _constants(module).items():
        owner, leaf = _owner(template, name)
        owner._buffers[leaf] = value
    return template


def _skeleton(template: nn.Module) -> nn.Module:
    """A copy of the module tree whose parameters still are the template's (no memory for weights)."""
    return copy.deepcopy(template, {id(p): p for p in template.parameters()})


def _replace(module: nn.Module, template: nn.Module, parameters: dict[int, nn.Parameter]) -> None:
    for mine, theirs in zip(module.modules(), template.modules(), strict=True):
        for leaf, parameter in theirs._parameters.items():
            if parameter is not None:
                mine._parameters[leaf] = parameters[id(parameter)]
