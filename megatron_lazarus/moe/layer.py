"""The adaptive expert-parallel MoE layer: any placement of experts, no padding, no capacity unless asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lazarus.moe.communication import Communicator
from megatron_lazarus.moe.context import StepContext
from megatron_lazarus.moe.dispatch import Dispatch, IntArray, Quotas, plan_dispatch, replica_quotas
from megatron_lazarus.moe.expert_clock import ExpertClock
from megatron_lazarus.moe.experts import Experts
from megatron_lazarus.moe.gating import Gate, GateSettings


class MoELayer(nn.Module):
    """Mixture-of-Experts layer with the arguments of ``deepspeed.moe.layer.MoE`` and some of its own.

    ``expert``: a module to copy for every expert, or a function of the expert's index that builds it.
    ``aux_loss_coefficient``: if given, coefficient * auxiliary loss is attached to the output, so that it trains
    without being added to the loss and survives activation recomputation; else the caller adds ``l_aux`` itself.
    ``router``: "softmax" as DeepSpeed, or "sigmoid" (dropless), with ``expert_bias_update_rate`` > 0 balanced by a
    bias instead of a loss. ``max_tokens_per_expert_chunk`` bounds the activations of one expert by recomputing it in
    chunks. ``constructed_experts``: so many experts this rank constructs, default all; others begin with the values of
    other ranks.

    Raises ValueError for arguments that do not fit together and for experts with dropout or batch statistics.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Callable[[int], nn.Module],
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        residual_mlp: nn.Module | None = None,
        aux_loss_coefficient: float | None = None,
        z_loss_coefficient: float = 0.0,
        router: Literal["softmax", "sigmoid"] = "softmax",
        expert_bias_update_rate: float = 0.0,
        max_tokens_per_expert_chunk: int | None = None,
        constructed_experts: int | None = None,
    ) -> None:
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise ValueError(
                "enable_expert_tensor_parallelism is True; only False is legal: an expert is on a rank as a whole"
            )
        if max_tokens_per_expert_chunk is not None and max_tokens_per_expert_chunk < 1:
            raise ValueError(f"max_tokens_per_expert_chunk is {max_tokens_per_expert_chunk}; it must be >= 1 or None")
        settings = GateSettings(
            num_experts=num_experts,
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            noisy_gate_policy=None if noisy_gate_policy in (None, "None") else noisy_gate_policy,  # type: ignore[arg-type]
            drop_tokens=drop_tokens,
            use_rts=use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
            score_function=router,
            expert_bias_update_rate=expert_bias_update_rate,
            z_loss_coefficient=z_loss_coefficient,
        )
        self.hidden_size, self.num_experts, self.k = hidden_size, num_experts, k
        self.aux_loss_coefficient = aux_loss_coefficient
        self.deepspeed_moe = _Routed(Gate(hidden_size, settings), Experts(expert, num_experts, constructed_experts))
        self.experts.max_tokens_per_chunk = max_tokens_per_expert_chunk
        self.use_residual = use_residual
        if use_residual:
            if residual_mlp is None:
                residual_mlp = expert if isinstance(expert, nn.Module) else expert(num_experts)
            self.mlp = residual_mlp
            self.coefficient = nn.Linear(hidden_size, 2)
        self.l_aux = torch.zeros(())
        self.exp_counts = torch.zeros(num_experts, dtype=torch.int64)
        self.load = np.zeros(num_experts, dtype=np.int64)
        self.tokens_in_last_forward = 0
        self.bind_context(StepContext())
        self.quotas: Quotas = replica_quotas
        self.clock = ExpertClock()
        self._replicas: IntArray = np.ones((num_experts, 1), dtype=np.int64)
        self._rank, self._rank_nodes, self._peers = 0, np.zeros(1, dtype=np.int64), Communicator()

    @property
    def gate(self) -> Gate:
        return self.deepspeed_moe.gate

    @property
    def experts(self) -> Experts:
        return self.deepspeed_moe.experts

    def initial_rank(self, expert: int, world_size: int) -> int:
        """The rank whose constructor's values an expert begins with."""
        return expert * world_size // self.num_experts

    def bind_context(self, context: StepContext) -> None:
        self.context = context
        self.experts.context = context

    def bind_placement(self, replicas: IntArray, rank: int, rank_nodes: IntArray, peers: Communicator) -> None:
        """Dispatch over ranks from now on: ``replicas`` [experts, ranks], ``rank_nodes`` [ranks]."""
        self._replicas, self._rank, self._rank_nodes, self._peers = replicas, rank, rank_nodes, peers

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer to [..., hidden]; returns (output, auxiliary loss, tokens wanted per expert [experts]).

        ``used_token`` marks tokens that may reach an expert, in the order of the flattened input.
        """
        tokens = hidden_states.reshape(-1, self.hidden_size)
        if self.context.ghost:
            used_token = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        routes = self.gate(tokens, used_token)
        # A ghost's losses must stay in the graph, where every rank has them, and weigh nothing.
        weight = 0.0 if self.context.ghost else 1.0
        aux_loss = routes.aux_loss * weight
        output = self._expert_outputs(tokens, routes.experts, routes.weights)
        output = output.view(hidden_states.shape)
        if self.use_residual:
            output = self._with_residual(hidden_states, output)
        if self.training and torch.is_grad_enabled():
            attached = routes.z_loss * weight
            if self.aux_loss_coefficient is not None:
                attached = attached + self.aux_loss_coefficient * aux_loss
            if attached.requires_grad and (
                self.aux_loss_coefficient is not None or self.gate.settings.z_loss_coefficient
            ):
                output = _AttachLoss.apply(output, attached, self.context)
        if self.context.phase == "forward":
            self.l_aux = aux_loss.detach() if self.aux_loss_coefficient is not None else aux_loss
            self.exp_counts = routes.wanted
            self.tokens_in_last_forward = tokens.shape[0]
        return output, aux_loss, routes.wanted

    def _expert_outputs(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=self.num_experts + 1)
        all_counts = self._gather_counts(counts)
        kept = order[int(all_counts[0, self._rank]) :]
        per_expert = all_counts[1:]
        if self.context.phase == "forward" and self.training:
            self.load += per_expert.sum(axis=1)
        plan = plan_dispatch(per_expert, self._replicas, self._rank, self._rank_nodes, self.quotas)
        dispatch = Dispatch(plan, kept, self.k, self._peers)
        arrived = dispatch.scatter(tokens)
        with self.clock.running(arrived):
            rows = self.experts(arrived, dispatch.tokens_per_expert)
        results = dispatch.gather(rows, tokens.shape[0])
        return (results * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def _gather_counts(self, counts: Tensor) -> IntArray:
        """[experts + 1] of every rank, as columns; row 0 counts dropped routes."""
        world = self._replicas.shape[1]
        if world == 1:
            return counts.cpu().numpy()[:, None]
        return self._peers.gather_counts(counts, world).T

    def _with_residual(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        dense = self.mlp(hidden_states)
        dense = dense[0] if isinstance(dense, tuple) else dense
        coefficient = F.softmax(self.coefficient(hidden_states), dim=-1)
        return output * coefficient[..., 0:1] + dense * coefficient[..., 1:]

    def peak_activation_bytes(self, tokens_per_rank: int) -> tuple[int, int]:
        """(balanced, worst case) bytes a rank keeps for this layer's experts between forward and backward.

        Balanced: every rank's experts see ``tokens_per_rank`` * k rows. Worst: all ranks' tokens come to one rank.
        Measured on a few rows; with ``max_tokens_per_expert_chunk`` only a chunk's inner activations live at a time.
        """
        per_row, inner = self.experts_row_bytes()
        world = self._replicas.shape[1]
        limit = self.experts.max_tokens_per_chunk or math.inf

        def size(rows: int) -> int:
            return int(per_row * rows + inner * min(rows, limit))

        return size(tokens_per_rank * self.k), size(tokens_per_rank * self.k * world)

    def experts_row_bytes(self) -> tuple[int, int]:
        """Bytes per dispatched row: for dispatch and combine, and for what the expert saves for backward."""
        modules = self.experts._modules_here()
        if not modules:
            return 0, 0
        parameter = next(modules[0].parameters())
        rows, saved = 8, 0
        own = {p.data_ptr() for p in modules[0].parameters()}

        def count(tensor: Tensor) -> Tensor:
            nonlocal saved
            if tensor.data_ptr() not in own:
                saved += tensor.numel() * tensor.element_size()
            return tensor

        probe = torch.zeros(rows, self.hidden_size, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.experts.run_one(modules[0], probe)
        row = self.hidden_size * parameter.element_size()
        return 4 * row, max(0, saved // rows - row)


class _Routed(nn.Module):
    """Only gives parameters the names that DeepSpeed's layer gives them."""

    def __init__(self, gate: Gate, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts


class _AttachLoss(torch.autograd.Function):
    """Identity on ``output`` that feeds ``loss`` the gradient it would get as a term of the micro-batch's loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, context: StepContext) -> Tensor:
        ctx.context, ctx.like = context, loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.context.loss_scale), None
