"""Random numbers keyed by what is computed, not by who computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 2**64 - 1


def stream_key(*numbers: int) -> int:
    """A 63-bit key from integers (splitmix64 finaliser after each): equal keys for equal numbers, anywhere."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seed torch's default generators (all devices) for one micro-batch's forward: torch's dropout takes no other."""
    torch.manual_seed(stream_key(seed, step, micro_batch))


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of torch's default generators: the CPU's and, if it is another one, that of ``device``."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_generator_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Go on as when ``generator_states`` gave ``states``."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
