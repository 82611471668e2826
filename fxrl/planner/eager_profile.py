"""The bytes that ops need which run one by one, under autograd.

forward     a value lives until its last reader has run, or until the backward of the last op
            whose derivative reads it; one that is read behind these ops, to their end
backward    the gradient of a value lives from the backward of its last reader to that of the
            op that made it; of one that is read behind these ops, or made ahead, likewise
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxrl.analysis.saved_tensors import read_later
from fxrl.ir.graph import (
    base_of,
    is_call,
    is_exchange,
    is_tensor,
    is_view,
    maker_of,
    needs_grad,
    readers_of,
    tensor_val,
)
from fxrl.planner.memory_profile import nbytes, workspace
from fxrl.planner.schedule import Measure, volume

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class CallCost:
    """Memory of a call that is no ATen op."""

    reads_later: tuple[fx.Node, ...] = ()  # values that its backward reads
    kept_bytes: int = 0  # which it keeps for its backward besides
    # Allocated while it runs, besides its results and gradients; what it returns as a tuple counts
    # as results where somebody reads it.
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """Memory of a group of ops."""

    forward_bytes: int  # most at a time while their forward runs
    kept_bytes: int  # alive between their forward and their backward
    backward_bytes: int  # most at a time besides those, while their backward runs

    @property
    def peak_bytes(self) -> int:
        """Most at a time, where the backward follows the forward."""
        return max(self.forward_bytes, self.kept_bytes + self.backward_bytes)


def profile(
    nodes: Sequence[fx.Node],
    measure: Measure,
    cost_of: Callable[[fx.Node], CallCost | None],
    given: Collection[fx.Node] | None = None,
) -> Profile:
    """Memory of ops that run one by one: their values and the gradients of these, without inputs of
    the graph. ``cost_of`` gives the cost of calls that are no ATen ops, else None.

    With ``given``, of the values made before these ops only those in ``given`` count, but gradients
    of weights count as well.
    """
    lives = _Lives(nodes, measure, given)
    lives.values(lives.calls(cost_of))
    lives.gradients()
    forward, backward = lives.bytes[: len(nodes)], lives.bytes[len(nodes) :]
    later = max(0, max(backward, default=0) - lives.kept)
    return Profile(max(forward, default=0), lives.kept, later)


class _Lives:
    """The bytes alive at each moment: all forwards in order, then all backwards, last op first."""

    def __init__(
        self, nodes: Sequence[fx.Node], measure: Measure, given: Collection[fx.Node] | None
    ) -> None:
        self._nodes, self._measure, self._given = nodes, measure, given
        self._place = {node: index for index, node in enumerate(nodes)}
        self.bytes, self.kept = [0] * (2 * len(nodes)), 0

    def _alive(self, size: int, first: int, last: int) -> None:
        for moment in range(first, last + 1):
            self.bytes[moment] += size
        if first < len(self._nodes) <= last:
            self.kept += size

    def _backward(self, node: fx.Node) -> int:
        return 2 * len(self._nodes) - 1 - self._place[maker_of(node)]

    def _counts(self, value: fx.Node) -> bool:
        """Whether a value that was made ahead counts."""
        if value.op != "call_function":
            return False
        return self._given is None or value in self._given

    def _read_behind(self, value: fx.Node) -> bool:
        return any(n not in self._place and n.op != "output" for n in readers_of(value))

    def calls(self, cost_of: Callable[[fx.Node], CallCost | None]) -> dict[fx.Node, int]:
        """Add what calls take themselves. Returns, for each value, when the last backward that
        reads it runs."""
        saved_by: dict[fx.Node, int] = {}
        for node in self._nodes:
            cost = cost_of(node) or self._own_cost(node)
            here, ends = self._place[node], self._backward(node)
            for value in map(base_of, cost.reads_later):
                saved_by[value] = max(saved_by.get(value, 0), ends)
            if cost.kept_bytes:
                self._alive(cost.kept_bytes, here, ends)
            self.bytes[here] += cost.forward_bytes
            if needs_grad(node):
                self.bytes[ends] += cost.backward_bytes
        return saved_by

    def _own_cost(self, node: fx.Node) -> CallCost:
        """Of a call that is no region. An exchange's backward is an exchange of as much."""
        inside = workspace(node, self._measure)
        return CallCost(tuple(read_later(node)), 0, inside, inside if is_exchange(node) else 0)

    def values(self, saved_by: Mapping[fx.Node, int]) -> None:
        place, end = self._place, len(self._nodes) - 1
        read = {base_of(arg) for node in self._nodes for arg in node.all_input_nodes}
        ahead = sorted(value for value in read - place.keys() if self._counts(value))
        for node in (*self._nodes, *ahead):
            if not is_tensor(node) or is_view(node):
                continue
            first = self._place.get(maker_of(node), 0)
            last = max((place[user] for user in readers_of(node) if user in place), default=first)
            last = end if node in place and self._read_behind(node) else last
            self._alive(nbytes(node, self._measure), first, max(last, saved_by.get(node, 0)))

    def gradients(self) -> None:
        count, lives = len(self._nodes), dict[fx.Node, tuple[int, int, int]]()
        for value, starts in self._graded():
            last = self._backward(value) if value in self._place else 2 * count - 1
            size, memory = nbytes(value, self._measure), _passed_on(value)
            most, first, ends = lives.get(memory, (size, starts, last))
            lives[memory] = max(most, size), min(first, starts), max(ends, last)
        for life in lives.values():
            self._alive(*life)

    def _graded(self) -> Iterator[tuple[fx.Node, int]]:
        """Values whose gradients count, and when these are there first."""
        count, weights = len(self._nodes), self._given is not None
        readers = _by_gradient(self._nodes)
        for value in dict.fromkeys([*readers, *filter(needs_grad, self._nodes)]):
            inside, behind = value in self._place, is_tensor(value) and self._read_behind(value)
            if inside and behind and _root(value) is value:
                yield value, count
            elif value in readers and (
                inside or self._counts(value) or (weights and value.op == "placeholder")
            ):
                yield value, min(map(self._backward, readers[value]))


def _by_gradient(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Values whose gradient has memory of its own, each with the ops of ``nodes`` whose backward
    creates it or adds to it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in filter(needs_grad, nodes):
        for value in node.all_input_nodes:
            if is_tensor(value) and needs_grad(value) and not _same_memory(node, value):
                found.setdefault(_root(value), []).append(node)
    return found


def _root(value: fx.Node) -> fx.Node:
    """The value whose gradient is the same memory as this one's, under another shape."""
    while (arg := value.args[0] if value.args else None) is not None:
        if not isinstance(arg, fx.Node) or not _same_memory(value, arg):
            return value
        value = arg
    return value


def _passed_on(value: fx.Node) -> fx.Node:
    """The value whose gradient is also this one's, because the only reader is a sum."""
    readers = [*readers_of(value)]
    while len(readers) == 1 and is_call(readers[0], aten.add.Tensor):
        (add,) = readers
        if is_view(add) or not _alike(add, value):
            break
        value = _root(add)
        readers = [*readers_of(value)]
    return value


def _alike(one: fx.Node, other: fx.Node) -> bool:
    ours, theirs = tensor_val(one), tensor_val(other)
    if ours is None or theirs is None:
        return False
    return ours.dtype == theirs.dtype and bool(volume(ours) == volume(theirs))


def _same_memory(view: fx.Node, value: fx.Node) -> bool:
    """Whether a view covers its whole value, so that both have one gradient."""
    return is_view(view) and _alike(view, value)
