"""A mixture-of-experts classifier; DeepSpeed makes the data loader, the optimizer and the schedule.

deepspeed --num_gpus 2 moe_classifier.py --deepspeed_config moe_classifier.json
"""

import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

FEATURES, CLASSES, HIDDEN = 20, 5, 64


class Clusters(Dataset):
    """Points around random centres, with the nearest centre as their class."""

    def __init__(self, size, seed):
        centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(size, FEATURES, generator=generator)
        self.labels = torch.cdist(self.points, centres).argmin(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Classifier(nn.Module):
    def __init__(self, num_experts, ep_size):
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.ReLU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_experts, ep_size=ep_size, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, points, labels):
        hidden = torch.tanh(self.embed(points))
        output, aux_loss, _ = self.moe(hidden)
        logits = self.head(hidden + output)
        return F.cross_entropy(logits, labels) + 0.01 * aux_loss, logits


def evaluate(engine, data):
    engine.eval()
    with torch.no_grad():
        loss, logits = engine(data.points.to(engine.device), data.labels.to(engine.device))
    engine.train()
    accuracy = (logits.argmax(1).cpu() == data.labels).float().mean()
    if engine.global_rank == 0:
        print(f"validation after {engine.global_steps} loss {loss.item():.7f} accuracy {accuracy:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    parser.add_argument("--save", help="directory for checkpoints, from which a run goes on")
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(42)
    model = Classifier(num_experts=4, ep_size=2)
    parameters = {"params": list(model.parameters()), "name": "parameters"}
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters),
        training_data=Clusters(1024, seed=1),
    )
    held_out = Clusters(64, seed=2)
    if args.save:
        path, _ = engine.load_checkpoint(args.save)
        if path is not None:
            evaluate(engine, held_out)
    for _epoch in range(args.epochs):
        for points, labels in loader:
            if args.steps and engine.global_steps >= args.steps:
                break
            loss, _ = engine(points.to(engine.device), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"step {engine.global_steps} loss {loss.item():.7f} lr {engine.get_lr()[0]:.2e}", flush=True)
            if engine.global_steps % 10 == 0:
                evaluate(engine, held_out)
            if args.save and engine.global_steps % args.save_interval == 0:
                engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
