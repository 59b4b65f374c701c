"""Maximum Rank Overlap (Lazarus, arXiv 2407.04656, section 4.1 and appendix A.2), and what to do where it truncates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_lazarus.planning.checks import FloatArray, IntArray


@dataclass(frozen=True)
class Groups:
    """Consecutive experts in ascending order of replicas, each group with nodes of its own.

    ``experts[i]`` of them are in group i; every one of its ``nodes[i]`` nodes holds them all. ``truncated``: the nodes
    ran out, so that the last group has fewer nodes than its first expert has replicas, or there are more groups than
    nodes.
    """

    experts: tuple[int, ...]
    nodes: tuple[int, ...]
    truncated: bool


def paper_groups(ascending: IntArray, slots: IntArray) -> Groups:
    """MRO's groups for replica counts in ascending order and node slots in descending order.

    With equal slots this is the paper's rule. With unequal ones a group is as large as its smallest node allows.
    """
    experts, nodes = [], []
    first, used = 0, 0
    truncated = False
    while first < len(ascending) and used < len(slots):
        size = min(int(ascending[first]), len(slots) - used)
        truncated |= size < min(int(ascending[first]), len(slots))
        members = min(int(slots[used + size - 1]), len(ascending) - first)
        experts.append(members)
        nodes.append(size)
        first += members
        used += size
    return Groups(tuple(experts), tuple(nodes), truncated or first < len(ascending))


def level_groups(ascending: IntArray, nodes: int, members: tuple[int, ...]) -> Groups:
    """At most ``nodes`` groups of the given sizes, on as many nodes each as fit: the largest give way first."""
    first = [sum(members[:group]) for group in range(len(members))]
    wanted = [min(int(ascending[expert]), nodes) for expert in first]
    level = max(wanted)
    while sum(min(size, level) for size in wanted) > nodes:
        level -= 1
    sizes = [min(size, level) for size in wanted]
    for group in reversed(range(len(members))):
        if wanted[group] > level and sum(sizes) < nodes:
            sizes[group] += 1
    return Groups(members, tuple(sizes), False)


def group_nodes(groups: Groups, order: IntArray, shared: tuple[int, ...]) -> list[IntArray]:
    """The nodes of each group, taken from ``order``.

    ``shared[i]`` of group i's nodes, the first ones of the order, are the same whatever the size of the groups, so that
    layers whose groups are at least that large lean on the same nodes.
    """
    starts = []
    first, further = 0, sum(shared)
    for size, part in zip(groups.nodes, shared, strict=True):
        extra = size - part
        starts.append(np.concatenate([order[first : first + part], order[further : further + extra]]))
        first, further = first + part, further + extra
    return starts


def members(groups: Groups) -> list[IntArray]:
    """The experts of each group, by their place in the ascending order."""
    return np.split(np.arange(sum(groups.experts)), np.cumsum(groups.experts)[:-1])


def dealt_members(groups: Groups, load: FloatArray) -> list[IntArray]:
    """The same with the experts of groups on equally many nodes dealt over these groups, evenly in number and load.

    ``load`` [experts in ascending order]. No group's nodes change, and so no survival.
    """
    result: list[IntArray] = []
    first = 0
    for size in dict.fromkeys(groups.nodes):
        alike = groups.nodes.count(size)
        count = sum(groups.experts[len(result) : len(result) + alike])
        heaviest = first + np.argsort(-load[first : first + count], kind="stable")
        turn, place = np.divmod(np.arange(count), alike)
        group = np.where(turn % 2, alike - 1 - place, place)
        result += [np.sort(heaviest[group == index]) for index in range(alike)]
        first += count
    return result


def core(members: list[IntArray], starts: list[IntArray], nodes: int) -> IntArray:
    """Counts [experts in ascending order, nodes], only the groups' own replicas: ``members[i]`` on ``starts[i]``."""
    counts = np.zeros((sum(map(len, members)), nodes), dtype=np.int64)
    for experts, places in zip(members, starts, strict=True):
        counts[np.ix_(experts, places)] = 1
    return counts
