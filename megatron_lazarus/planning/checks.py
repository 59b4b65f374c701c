"""Argument checks of the planner: every refusal names the argument, its value and the legal range."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Value = TypeVar("Value")


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """``value`` as an int within [low, high]. Raises ValueError otherwise."""
    legal = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be {legal}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} is {number}; it must be {legal}")
    return number


def slot_counts(name: str, value: int | Sequence[int] | IntArray, owners: int, owner: str) -> IntArray:
    """Slots of each of ``owners`` nodes or ranks, from one number for all or one for each. Raises ValueError."""
    if np.ndim(value) == 0:
        return np.full(owners, integer(name, value, 1), dtype=np.int64)
    values = list(value)  # type: ignore[arg-type]
    if len(values) != owners:
        raise ValueError(f"{name} has {len(values)} entries; it must have one for each of the {owners} {owner}s")
    return np.array([integer(f"{name}[{index}]", slots, 1) for index, slots in enumerate(values)], dtype=np.int64)


def token_loads(loads: npt.ArrayLike, dimensions: tuple[int, ...] = (1, 2)) -> FloatArray:
    """``loads`` as float64 of one of the given numbers of dimensions. Raises ValueError if negative or not finite."""
    array = np.asarray(loads, dtype=np.float64)
    if array.ndim not in dimensions or array.size == 0:
        raise ValueError(f"loads has shape {array.shape}; it must be [layers, experts] or [experts], not empty")
    illegal = ~(np.isfinite(array) & (array >= 0))
    if illegal.any():
        where = tuple(int(index) for index in np.argwhere(illegal)[0])
        raise ValueError(f"loads{list(where)} is {array[where]}; token loads must be finite and at least 0")
    return array


def enough_slots(name: str, slots: int, experts: int) -> None:
    """Raises ValueError if there is not one slot for every expert."""
    if slots < experts:
        raise ValueError(f"{name} gives {slots} slots for {experts} experts; there must be at least {experts}")


def by_node(name: str, labels: Mapping[int, Value], nodes: Sequence[int]) -> list[Value]:
    """The label of each node, in the order of ``nodes``. Raises ValueError unless exactly these nodes are labelled."""
    if unknown := sorted(set(labels) - set(nodes)):
        raise ValueError(f"{name} names unknown nodes {unknown}; legal nodes are {sorted(nodes)}")
    if missing := sorted(set(nodes) - set(labels)):
        raise ValueError(f"{name} has no entry for nodes {missing}; legal nodes are {sorted(nodes)}")
    return [labels[node] for node in nodes]


def node_weights(name: str, weights: Sequence[float]) -> FloatArray:
    """Failure weights as float64. Raises ValueError unless every one is finite and above 0."""
    array = np.asarray(weights, dtype=np.float64)
    illegal = ~(np.isfinite(array) & (array > 0))
    if illegal.any():
        index = int(np.argmax(illegal))
        raise ValueError(f"{name}[{index}] is {array[index]}; failure weights must be finite and above 0")
    return array


def first_seen_order(labels: Sequence[Hashable]) -> IntArray:
    """Number of each label, counting distinct labels in the order in which they first appear."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
