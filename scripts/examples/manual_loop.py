"""An optimizer, a schedule and a loss of its own: DeepSpeed sees the model's outputs only.

deepspeed --num_gpus 2 manual_loop.py --deepspeed_config manual_loop.json
"""

import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn

INPUTS, HIDDEN, OUTPUTS = 12, 32, 3


class Regressor(nn.Module):
    def __init__(self, num_experts, ep_size):
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        options = {"k": 2, "drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(HIDDEN, expert, num_experts, ep_size=ep_size, **options)
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        output, aux_loss, _ = self.moe(hidden)
        return self.last(hidden + output), aux_loss


def batch(step, rank, size):
    """Points on a surface that a fixed random network draws."""
    teacher = torch.Generator().manual_seed(1)
    weights = torch.randn(INPUTS, OUTPUTS, generator=teacher)
    inputs = torch.randn(size, INPUTS, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, torch.sin(inputs @ weights)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", help="directory for checkpoints, from which a run goes on")
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(42)
    model = Regressor(num_experts=4, ep_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    criterion = nn.SmoothL1Loss()
    engine, optimizer, _, schedule = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, lr_scheduler=schedule
    )
    if args.save:
        engine.load_checkpoint(args.save)
    while engine.global_steps < args.steps:
        inputs, targets = batch(engine.global_steps, engine.global_rank, engine.train_micro_batch_size_per_gpu())
        outputs, aux_loss = engine(inputs.to(engine.device))
        loss = criterion(outputs, targets.to(engine.device)) + 0.01 * aux_loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            rate = schedule.get_last_lr()[0]
            print(f"step {engine.global_steps} loss {loss.item():.7f} lr {rate:.2e}", flush=True)
        if args.save and engine.global_steps % args.save_interval == 0:
            engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
