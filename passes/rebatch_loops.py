"""Undo loops over the batch: one op on all sequences instead of one per sequence.

    stack([logsumexp(select(x, 0, 0)), logsumexp(select(x, 0, 1)), ...])
becomes
    logsumexp(x)

Code that walks ``for row in logits`` (to bound its eager memory) is unrolled by tracing. The
results are stacked again, so the same ops on the whole tensor compute the same values; a loss head
then is one site instead of one per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    OpOverload,
    ancestors,
    bound,
    hint,
    is_call,
    is_tensor,
    is_view,
    shape_of,
    with_arguments,
)
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.plan import Choice
from fxrl.ir.remark import Refusal

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


@dataclass(frozen=True)
class RebatchLoops(Normalisation[Site]):
    """Replace stacks of per-sequence results by the batched computation, where it is one."""

    name: ClassVar[str] = "rebatch-loops"
    doc: ClassVar[PassDoc] = PassDoc(
        "`torch.stack([f(row) for row in logits])`, unrolled by tracing",
        "an op per sequence; the loss head is one site instead of one per sequence",
        "nothing",
        "the sequences are computed differently, or by an op that knows no batch",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site]:
        for stack in gm.graph.find_nodes(op="call_function", target=aten.stack.default):
            if bound(stack)["dim"] == 0 and _is_loop(stack.args[0]):
                yield Site(stack, 0)

    def rewrite(self, gm: fx.GraphModule, site: Site, choice: Choice) -> Applied:
        stack = site.anchor
        parts: Any = stack.args[0]
        with gm.graph.inserting_before(stack):
            batched = _Loop(gm.graph, len(parts)).batch(tuple(parts))
        stack.replace_all_uses_with(batched)
        return Applied(f"a loop over {len(parts)} sequences runs on all at once")


def _is_loop(parts: Any) -> bool:
    """Whether the first two values come from the first two slices of one tensor."""
    if len(parts) < 2:
        return False
    first, second = (_slices(part) for part in parts[:2])
    return bool({s for s, at in first if at == 0} & {s for s, at in second if at == 1})


def _slices(node: fx.Node) -> set[tuple[Any, Any]]:
    selects = [n for n in ancestors([node]) if is_call(n, aten.select.int) and n.args[1] == 0]
    return {(_seen_as(n.args[0]), n.args[2]) for n in selects}


def _seen_as(node: Any) -> Any:
    """What equal views of one value share: a write into it leaves each reader a view of its own."""
    if not is_view(node) or node.kwargs:
        return node
    return node.target, _seen_as(node.args[0]), str(node.args[1:])


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
            if not is_call(node, aten.select.int) or node.args[1:] != (0, index):
                return None
            if _seen_as(node.args[0]) != _seen_as(source):
                return None
        # A symbolic size that is this number now becomes a guard: other batches are captured anew.
        if hint(shape_of(source)[0]) != self.count or not bool(shape_of(source)[0] == self.count):
            return None
        return source  # type: ignore[no-any-return]

    def _repeat(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        if any(node.op != "call_function" or node.target != first.target for node in nodes):
            raise Refusal("the sequences are not computed by the same ops", at=first)
        if not is_tensor(first) or not _known(first):
            raise Refusal(f"{first.target} is not known to act within one sequence", at=first)
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
                raise Refusal("a sequence's values are broadcast against others", at=node)
            return self.batch(tuple(given))
        if any(item != given[0] for item in given):
            raise Refusal("the sequences are computed with different arguments", at=node)
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
    if dims is None or dims == []:
        raise Refusal("a sequence's values are all reduced at once", at=node)
    source: Any = node.args[0]
    rank = len(shape_of(source)) + (node.target is aten.unsqueeze.default)
    if isinstance(dims, (list, tuple)):
        return [int(d) % rank - rank for d in dims]
    return int(dims) % rank - rank
