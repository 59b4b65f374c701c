"""A worker that trains nothing: collectives per step, and a state that depends on every committed step once.

Faults come from the environment: ``LOOP_FAULT`` is ``kind:node:number`` (several with commas).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lazarus.elastic.interfaces import use_interface
from megatron_lazarus.elastic.membership import Generation, GenerationBroken, Membership
from megatron_lazarus.elastic.process_groups import BuildFailed, ProcessGroups, is_collective_error

LIMIT_S = 90.0
MODULUS = 1_000_003


def state_after(steps: int) -> int:
    """What the state must be after so many committed steps."""
    state = 1
    for step in range(steps):
        state = (state * 31 + step) % MODULUS
    return state


class Loop:
    def __init__(self, log_dir: Path) -> None:
        self.stop_file = log_dir / "stop"
        self.pause = float(os.environ.get("LOOP_PAUSE_S", "0.01"))
        self.steps, self.state = 0, 1
        self.membership = Membership.from_environment(check={"code": os.environ.get("LOOP_CHECK", "1")})
        config = self.membership.config
        limit_s = config.collective_timeout_s + config.heartbeat_timeout_s
        self.groups = ProcessGroups("gloo", limit_s, spared=self.membership.own_sockets)
        self.membership.on_broken(self.groups.unblock)
        self.membership.drain_on_signals()
        use_interface(config.interface, self.membership.local_address)
        self.collectives = 0

    def fault(self, kind: str, number: int) -> bool:
        return f"{kind}:{self.membership.node}:{number}" in os.environ.get("LOOP_FAULT", "").split(",")

    def run(self) -> int:
        generation = self.membership.join(LIMIT_S)
        while True:
            try:
                if self.generation(generation):
                    return 0
            except (RuntimeError, BuildFailed) as error:
                if not isinstance(error, BuildFailed | GenerationBroken) and not is_collective_error(error):
                    self.membership.report_failure(error, own=True)
                    raise
                print(f"{self.membership.place}: {error}", flush=True)
                self.membership.report_failure(error)
                self.groups.break_groups()
                generation = self.membership.next_generation(LIMIT_S)

    def generation(self, generation: Generation) -> bool:
        """Run until a change (raises) or the end; returns whether this worker is done."""
        while True:
            if self.fault("die in build", generation.number):
                os.kill(os.getpid(), signal.SIGKILL)
            self.groups.build(generation)
            self.membership.built()
            self.agree()
            worked = False
            while True:
                if self.fault("raise", self.steps):
                    raise RuntimeError("a bad batch")
                if self.fault("hang", self.steps):
                    self.membership.note(self.steps, "forward", self.collectives)
                    time.sleep(LIMIT_S)
                stop, change = self.step(generation.rank)
                if not worked:
                    worked = True
                    if generation.rank == 0:
                        self.membership.event("working", steps=self.steps)
                    print(f"working in {generation.number} as {generation.rank}/{generation.world_size}", flush=True)
                if stop or change:
                    break
            if stop:
                assert self.state == state_after(self.steps), (self.state, self.steps)
                self.membership.finish(LIMIT_S, value={"steps": self.steps, "world_size": generation.world_size})
                self.groups.break_groups()
                return True
            joining, draining = self.agree_on_change()
            self.groups.break_groups()
            if self.membership.node in draining:
                self.membership.leave()
                return True
            generation = self.membership.next_generation(LIMIT_S, admit=joining)

    def agree(self) -> None:
        """All members go on from the newest committed step."""
        both = torch.tensor([self.steps, self.state])
        gathered = [torch.empty_like(both) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, both)
        self.steps, self.state = max((int(pair[0]), int(pair[1])) for pair in gathered)

    def step(self, rank: int) -> tuple[bool, bool]:
        time.sleep(self.pause)
        world = dist.get_world_size()
        self.note("collective")
        exchanged = torch.empty(world, dtype=torch.int64)
        dist.all_to_all_single(exchanged, torch.full((world,), rank))
        assert exchanged.tolist() == list(range(world))
        self.note("collective")
        vote = torch.zeros(1 << 16, dtype=torch.float64)
        vote[0] = float(self.stop_file.exists())
        vote[1] = float(bool(self.membership.pending))
        vote[2] = 1.0
        dist.all_reduce(vote)
        assert int(vote[2]) == world
        self.state = (self.state * 31 + self.steps) % MODULUS
        self.steps += 1
        self.note("step")
        return bool(vote[0] > 0), bool(vote[1] > 0)

    def note(self, phase: str) -> None:
        self.collectives += phase == "collective"
        self.membership.note(self.steps, phase, self.collectives)

    def agree_on_change(self) -> tuple[list[str], list[str]]:
        pending = self.membership.pending
        lists = [[list(pending.join), list(pending.drain)]]
        dist.broadcast_object_list(lists, src=0)
        return lists[0][0], lists[0][1]


if __name__ == "__main__":
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s")
    sys.exit(Loop(Path(sys.argv[1])).run())
