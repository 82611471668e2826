"""Undo loops over the batch: one op on all sequences instead of one per sequence.

    stack([logsumexp(select(x, 0, 0)), logsumexp(select(x, 0, 1)), ...])
becomes
    logsumexp(x)

Code that walks ``for row in logits`` (to bound its eager memory) is unrolled by tracing. The
results are stacked again, so the same ops on the whole tensor compute the same values; a loss head
then is one site instead of one per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    OpOverload,
    bound,
    hint,
    is_call,
    is_tensor,
    shape_of,
    with_arguments,
)

aten = torch.ops.aten

#: Ops that act within one sequence, along ``dim``.
_ALONG_A_DIM = (
    aten.logsumexp.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.gather.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.argmax.default,
)


class _NotALoop(Exception):
    """The stacked values are not one computation repeated."""


def rebatch_loops(graph: fx.Graph) -> None:
    """Replace stacks of per-sequence results by the batched computation, where it is one."""
    for stack in list(graph.nodes):
        if not is_call(stack, aten.stack.default):
            continue
        parts: Any = stack.args[0]
        if bound(stack)["dim"] != 0 or len(parts) < 2:
            continue
        with graph.inserting_before(stack):
            try:
                batched = _Loop(graph, len(parts)).batch(tuple(parts))
            except _NotALoop:
                continue  # nodes made on the way are dead and go with the dead code
        stack.replace_all_uses_with(batched)


class _Loop:
    def __init__(self, graph: fx.Graph, count: int) -> None:
        self.graph = graph
        self.count = count
        self.done: dict[tuple[fx.Node, ...], fx.Node] = {}

    def batch(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """The value whose slices along a new dim 0 are ``nodes``."""
        if nodes not in self.done:
            source = self._selected(nodes)
            self.done[nodes] = self._repeat(nodes) if source is None else source
        return self.done[nodes]

    def _selected(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        first = nodes[0]
        if not is_call(first, aten.select.int) or first.args[1] != 0:
            return None
        source: Any = first.args[0]
        for index, node in enumerate(nodes):
            if not is_call(node, aten.select.int) or node.args != (source, 0, index):
                return None
        # A symbolic size that is this number now becomes a guard: other batches are captured anew.
        if hint(shape_of(source)[0]) != self.count or not bool(shape_of(source)[0] == self.count):
            return None
        return source  # type: ignore[no-any-return]

    def _repeat(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        if any(node.op != "call_function" or node.target != first.target for node in nodes):
            raise _NotALoop
        if not is_tensor(first) or not _known(first):
            raise _NotALoop
        given = [bound(node) for node in nodes]
        changed = {
            name: self._argument(first, name, [arguments[name] for arguments in given])
            for name in given[0]
        }
        kept = {name: value for name, value in changed.items() if value is not given[0][name]}
        args, kwargs = with_arguments(first, **kept)
        return Builder(self.graph, first).call(first.target, *args, **kwargs)

    def _argument(self, node: fx.Node, name: str, given: list[Any]) -> Any:
        rank = len(shape_of(node))
        if is_tensor(given[0]):
            same = all(item is given[0] for item in given)
            if same and given[0] is not node.args[0] and len(shape_of(given[0])) <= rank:
                return given[0]  # read alike by every sequence: broadcasting stays right-aligned
            width = len(shape_of(given[0]))
            if node.target not in _ALONG_A_DIM and width != rank:
                raise _NotALoop
            return self.batch(tuple(given))
        if any(item != given[0] for item in given):
            raise _NotALoop
        if name == "dim" and node.target in _ALONG_A_DIM:
            return _from_the_end(node, given[0])
        return given[0]


def _known(node: fx.Node) -> bool:
    target = node.target
    if target in _ALONG_A_DIM or target in COPIES:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags


def _from_the_end(node: fx.Node, dims: Any) -> Any:
    """Dims counted from the end, so that a new first dim does not shift them."""
    if dims is None or dims == []:  # all of them, which would be the new one too
        raise _NotALoop
    source: Any = node.args[0]
    rank = len(shape_of(source)) + (node.target is aten.unsqueeze.default)
    if isinstance(dims, (list, tuple)):
        return [int(d) % rank - rank for d in dims]
    return int(dims) % rank - rank
