"""What ``deepspeed.moe.layer.MoE`` is in a script that runs under lazarus: the same arguments, the adaptive layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lazarus.moe.layer import MoELayer


class MoE(MoELayer):
    """The adaptive layer with exactly the constructor, names and values of ``deepspeed.moe.layer.MoE``.

    As there, a rank constructs ``num_experts / ep_size`` experts, copies of ``expert``, so that the draws of
    initialisation functions and the numbers of parameters stay; expert e begins with what rank e // that number
    constructed. Where experts live afterwards does not depend on ``ep_size``. Experts get rows [1, 1, rows, hidden],
    of as many dimensions as from DeepSpeed.

    Raises ValueError, naming the argument, for what cannot be honoured.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
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
    ) -> None:
        if not isinstance(expert, nn.Module):
            raise ValueError(f"expert is a {type(expert).__name__}; it must be a torch.nn.Module")
        if ep_size < 1 or num_experts % ep_size:
            raise ValueError(f"ep_size is {ep_size}; it must divide num_experts = {num_experts}")
        if use_tutel:
            raise ValueError("use_tutel is True; only False is legal: tokens are dispatched by lazarus, not by Tutel")
        super().__init__(
            hidden_size,
            expert,
            num_experts,
            ep_size,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            use_residual,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            use_tutel,
            enable_expert_tensor_parallelism,
            top2_2nd_expert_sampling,
            constructed_experts=num_experts // ep_size,
        )
        self.ep_size, self.num_local_experts = ep_size, num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.experts.leading_dimensions = (1, 1)
        for parameter in self.experts.parameters():
            # By these the script, and DeepSpeed's functions that it calls, tell experts' parameters.
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing: experts are exchanged over the whole world, there are no expert-parallel groups."""

    def initial_rank(self, expert: int, world_size: int) -> int:
        """Where DeepSpeed's layer would have constructed it; with fewer ranks than ``ep_size``, one that is there."""
        return (expert // self.num_local_experts) % world_size

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(output, auxiliary loss, tokens wanted per expert [experts]), as ``deepspeed.moe.layer.MoE``.

        Raises RuntimeError before ``deepspeed.initialize``, unless this rank has constructed all experts.
        """
        if self.experts.is_partial:
            raise RuntimeError(
                f"this rank has {self.num_local_experts} of {self.num_experts} experts: the model cannot compute "
                "before deepspeed.initialize"
            )
        result = super().forward(hidden_states, used_token)
        self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts = self.l_aux, self.exp_counts
        return result
