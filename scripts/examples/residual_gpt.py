"""A small GPT whose MLPs are residual mixtures of experts (PR-MoE); it reads its batches itself, from its own text.

deepspeed --num_gpus 2 residual_gpt.py --deepspeed_config residual_gpt.json
"""

import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional as F

VOCABULARY, HIDDEN, HEADS, LAYERS, LENGTH = 256, 64, 4, 2, 32


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden):
        return self.down(F.gelu(self.up(hidden)))


class Block(nn.Module):
    def __init__(self, num_experts, ep_size):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(
            HIDDEN, MLP(), num_experts, ep_size=ep_size, k=1, capacity_factor=1.5, use_residual=True, use_rts=False
        )

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        output, aux_loss, _ = self.moe(self.norm2(hidden))
        return hidden + output, aux_loss


class GPT(nn.Module):
    def __init__(self, num_experts, ep_size):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(num_experts, ep_size) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens, labels=None):
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        aux_losses = 0.0
        for block in self.blocks:
            hidden, aux_loss = block(hidden)
            aux_losses = aux_losses + aux_loss
        logits = self.head(self.norm(hidden))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * aux_losses


class Text:
    """Random pieces of this program's own text; every rank draws its own."""

    def __init__(self, rank):
        with open(__file__, "rb") as file:
            self.bytes = torch.tensor(list(file.read()))
        self.rank = rank

    def batch(self, number, size):
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        starts = torch.randint(len(self.bytes) - LENGTH - 1, (size,), generator=generator)
        pieces = torch.stack([self.bytes[start : start + LENGTH + 1] for start in starts.tolist()])
        return pieces[:, :-1], pieces[:, 1:]


def evaluate(engine, text):
    engine.eval()
    with torch.no_grad():
        losses = [engine(*text.batch(10_000 + number, 4)).item() for number in range(2)]
    engine.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", help="directory for checkpoints, from which a run goes on")
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(42)
    model = GPT(num_experts=4, ep_size=2)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if args.save:
        engine.load_checkpoint(args.save)
    text = Text(engine.global_rank)
    micro = 0
    while engine.global_steps < args.steps:
        tokens, labels = text.batch(10 * engine.global_steps + micro, engine.train_micro_batch_size_per_gpu())
        loss = engine(tokens.to(engine.device), labels.to(engine.device))
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        micro += 1
        if not at_boundary:
            continue
        micro = 0
        if engine.global_rank == 0:
            print(f"step {engine.global_steps} loss {loss.item():.7f}", flush=True)
        if engine.global_steps % 10 == 0:
            validation = evaluate(engine, text)
            if engine.global_rank == 0:
                print(f"validation after {engine.global_steps} loss {validation:.7f}", flush=True)
        if args.save and engine.global_steps % args.save_interval == 0:
            engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
