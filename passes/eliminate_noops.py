"""Remove calls that give back what they were given.

    %b = view(%a, shape of %a)                 %b is %a
    %b = select(view(%a, [n, 1]), 1, 0)        %b = view(%a, [n])
    %c = view(view(%a, ..), shape)             %c = view(%a, shape)
    %c = to_copy(to_copy(%a, wide), narrow)    %c is %a, where the first cast loses nothing

Such views are left between a rewrite that works on rows and the next one, which works on
``[B, T]``; adapters in float32 under autocast cause the casts. In the two halves of a region, whose
gradients are ordinary values, a detach is a no-op too, and the size that autograd reads off a view
is the size that the view was given; what is added then has the sum as its only reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxrl.ir.bodies import graphs_of
from fxrl.ir.graph import RESHAPES, equal_shapes, is_call, is_tensor, shape_of, tensor_val
from fxrl.ir.graph_pass import SETTLED, Applied, Normalisation, PassDoc, Site, Stage

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_DETACHES = (aten.detach.default, aten.alias.default)


@dataclass(frozen=True, slots=True)
class Noop(Site):
    """A call and the value that it gives back; or the one whose view it is."""

    value: fx.Node


@dataclass(frozen=True)
class EliminateNoops(Normalisation[Noop]):
    """Readers of a call that does nothing read its operand.

    Attributes:
        differentiated: the graph holds its own gradients, so a detach is a no-op.
    """

    differentiated: bool = field(default=False, metadata=SETTLED)

    name = "eliminate-noops"
    stage = Stage.CLEAN
    doc = PassDoc(
        "a view to the shape that a value has, a cast to a wider dtype and back",
        "calls, and copies in the wider dtype",
        "nothing",
        "the value is returned by the graph: an output stays what it was",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Noop]:
        for graph in graphs_of(gm):
            for node in graph.nodes:
                value = self._operand(node)
                returned = any(user.op == "output" for user in node.users)
                if value is not None and (self.differentiated or not returned):
                    yield Noop(node, 0, value)

    def respell(self, gm: fx.GraphModule, site: Noop) -> Applied:
        node = site.anchor
        value = self._operand(node)  # an earlier site may have shortened the way
        if value is None:
            return Applied("a call that does nothing is left out")
        if is_call(node, *RESHAPES) and not _same_shape(node, value):
            node.update_arg(0, value)
            if node.target is aten.view.default and not is_call(value, *RESHAPES):
                node.target = aten.reshape.default  # the value's strides may be any
        elif is_call(node, aten.sym_size.int) or _same_shape(node, value):
            node.replace_all_uses_with(value)
        else:  # one column of a view: the view without it
            column: Any = node.args[0]
            node.target, node.args = aten.reshape.default, (value, column.args[1][:1])
        return Applied("a call that does nothing is left out")

    def _operand(self, node: fx.Node) -> fx.Node | None:
        if not node.users or node.op != "call_function" or not node.args:
            return None
        first: Any = node.args[0]
        if is_call(node, *_DETACHES):
            return first if self.differentiated else None
        if is_call(node, aten.sym_size.int):
            return _told_size(node) if self.differentiated else None
        if is_call(node, *RESHAPES):
            if _same_shape(node, first):
                return first  # type: ignore[no-any-return]
            return first.args[0] if is_call(first, *RESHAPES) else None  # type: ignore[return-value]
        if is_call(node, aten.select.int):
            return _before_column(node)
        return _before_round_trip(node) if is_call(node, *_CASTS) else None


def _same_shape(node: fx.Node, value: Any) -> bool:
    return is_tensor(value) and equal_shapes(shape_of(node), shape_of(value))


def _told_size(node: fx.Node) -> fx.Node | None:
    """``s`` of ``sym_size(view(x, [.., s, ..]), dim)``."""
    view: Any = node.args[0]
    dim: Any = node.args[1]
    if not is_call(view, *RESHAPES):
        return None
    sizes: Any = view.args[1]
    return sizes[dim] if isinstance(sizes[dim], fx.Node) else None


def _before_column(node: fx.Node) -> fx.Node | None:
    """``x`` of ``select(view(x, [n, 1]), 1, 0)``, whatever its shape."""
    column: Any = node.args[0]
    if not is_call(column, *RESHAPES, aten.unsqueeze.default) or node.args[1:] not in (
        (1, 0),
        (-1, 0),
    ):
        return None
    source: Any = column.args[0]
    one_column = len(shape_of(column)) == 2 and shape_of(column)[1] == 1
    return source if one_column else None


def _before_round_trip(node: fx.Node) -> fx.Node | None:
    """``x`` of a cast to a wider dtype and back."""
    cast: Any = node.args[0]
    if not (_only_casts(node) and is_call(cast, *_CASTS) and _only_casts(cast)):
        return None
    value, wide = tensor_val(cast.args[0]), tensor_val(cast)
    if value is None or wide is None or node.meta["val"].dtype != value.dtype:
        return None
    if not _holds(wide.dtype, value.dtype):
        return None
    source: Any = cast.args[0]
    return source  # type: ignore[no-any-return]


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of one floating dtype is one of the other; ``torch.promote_types`` knows
    no float8."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    more, less = torch.finfo(wide), torch.finfo(narrow)
    least = [one.smallest_normal * one.eps for one in (more, less)]
    return more.eps <= less.eps and more.max >= less.max and least[0] <= least[1]


def _only_casts(node: fx.Node) -> bool:
    return is_call(node, torch.ops.prims.convert_element_type.default) or set(node.kwargs) == {
        "dtype"
    }
