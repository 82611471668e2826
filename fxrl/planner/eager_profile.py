"""The bytes that ops need which run one by one, under autograd.

forward     a value lives until its last reader has run, or until the backward of the last op
            whose derivative reads it
backward    the gradient of a value lives from the backward of its last reader to that of the
            op that made it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fxrl.analysis.saved_tensors import read_later
from fxrl.ir.graph import base_of, is_tensor, is_view, needs_grad, tensor_val
from fxrl.planner.memory_profile import nbytes
from fxrl.planner.schedule import Measure, volume


@dataclass(frozen=True, slots=True)
class CallCost:
    """What a call takes that is no ATen op.

    Attributes:
        reads_later: values that its backward reads.
        kept_bytes: which it keeps for its backward besides.
        forward_bytes, backward_bytes: allocated while it runs, besides its results and gradients.
    """

    reads_later: tuple[fx.Node, ...] = ()
    kept_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


def peak(
    nodes: Sequence[fx.Node], measure: Measure, cost_of: Callable[[fx.Node], CallCost | None]
) -> int:
    """Most bytes at a time, from before the forward of ``nodes`` to behind their backward: what
    they make and read, and the gradients of that; inputs of the graph left out.

    Args:
        nodes: a part of a graph, in order.
        measure: what the sizes are.
        cost_of: costs of calls that are no ATen ops; None for such as are.
    """
    place = {node: index for index, node in enumerate(nodes)}
    costs = [cost_of(node) or CallCost(tuple(read_later(node))) for node in nodes]
    lives = [0] * (2 * len(nodes))  # forwards, then backwards, last op first

    def alive(size: int, first: int, last: int) -> None:
        for moment in range(first, last + 1):
            lives[moment] += size

    def backward(node: fx.Node) -> int:
        return 2 * len(nodes) - 1 - place[node]

    saved_by: dict[fx.Node, int] = {}  # value -> when the last backward that reads it runs
    for node, cost in zip(nodes, costs, strict=True):
        for value in map(base_of, cost.reads_later):
            saved_by[value] = max(saved_by.get(value, 0), backward(node))
        if cost.kept_bytes:
            alive(cost.kept_bytes, place[node], backward(node))
        lives[place[node]] += cost.forward_bytes
        if needs_grad(node):
            lives[backward(node)] += cost.backward_bytes
    read = {base_of(arg) for node in nodes for arg in node.all_input_nodes}
    for node in dict.fromkeys([*nodes, *sorted(read)]):
        if not is_tensor(node) or is_view(node) or node.op != "call_function":
            continue
        first = place.get(node, 0)
        last = max((place[user] for user in _readers(node) if user in place), default=first)
        alive(nbytes(node, measure), first, max(last, saved_by.get(node, 0)))
    for value, readers in _by_gradient(nodes).items():
        ends = backward(value) if value in place else max(map(backward, readers))
        alive(nbytes(value, measure), min(map(backward, readers)), ends)
    return max(lives, default=0)


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    for user in node.users:
        yield user
        if is_view(user):
            yield from _readers(user)


def _by_gradient(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Values that get a gradient in memory of its own, each with those of ``nodes`` whose backward
    makes it or adds to it; weights left out, whose gradients stay."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in filter(needs_grad, nodes):
        for value in node.all_input_nodes:
            if is_tensor(value) and needs_grad(value) and not _same_memory(node, value):
                root = _root(value)
                if root.op == "call_function":
                    found.setdefault(root, []).append(node)
    return found


def _root(value: fx.Node) -> fx.Node:
    """The value whose gradient, seen under other shapes, is this one's."""
    while (arg := value.args[0] if value.args else None) is not None:
        if not isinstance(arg, fx.Node) or not _same_memory(value, arg):
            return value
        value = arg
    return value


def _same_memory(view: fx.Node, value: fx.Node) -> bool:
    """Whether the gradient of a value is that of a view of it: both hold as much."""
    ours, theirs = tensor_val(view), tensor_val(value)
    if ours is None or theirs is None or not is_view(view):
        return False
    return bool(volume(ours) == volume(theirs))
