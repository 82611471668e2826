"""How a token-wise part of a graph, written for ``[B, T, H]``, runs on ``[rows, H]``.

Its body keeps its ops: the rows take the place of one symbolic token dim, the other token dims
become 1. So ``[B, T, H]`` with symbols for B and T is fed as ``[rows, 1, H]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import Size, shape_of, tensor_val
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


class TileRefusal(Exception):
    """The part cannot run on rows; the message is the reason."""


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Which inputs hold tokens, and what the token dims are.

    Attributes:
        token_dims: input -> number of leading token dims.
        sizes: the token dims' sizes, the same for all inputs and outputs.
        carrier: the token dim that the rows take.
    """

    token_dims: Mapping[fx.Node, int]
    sizes: tuple[Size, ...]
    carrier: int

    @classmethod
    def of(
        cls,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        token_dims: Mapping[fx.Node, int],
    ) -> TileLayout:
        """Check and describe the layout.

        Raises:
            TileRefusal: token sizes disagree, are constant, or an output lacks them.
        """
        strangers = [node for node in token_dims if node not in inputs]
        if strangers:
            raise TileRefusal(f"%{strangers[0]} is no input of the part")
        first, count = next(iter(token_dims.items()))
        sizes = shape_of(first)[:count]
        for node in (*token_dims, *outputs):
            if shape_of(node)[:count] != sizes or token_dims.get(node, count) != count:
                raise TileRefusal(f"%{node} does not start with the token dims {_show(sizes)}")
        symbolic = [d for d, size in enumerate(sizes) if not isinstance(size, int)]
        if not symbolic or any(isinstance(s, int) and s != 1 for s in sizes):
            raise TileRefusal(f"the token dims {_show(sizes)} must be symbolic, or 1 beside one")
        return cls(token_dims, sizes, symbolic[0])

    def rows_val(self, node: fx.Node) -> torch.Tensor:
        """What a token-wise value looks like as ``[rows, ...]``."""
        val = tensor_val(node)
        assert val is not None
        rows: Any = 1
        for size in self.sizes:
            rows = rows * size
        return val.new_empty((rows, *val.shape[len(self.sizes) :]))

    # -- inside the body
    def unflatten(
        self, graph: fx.Graph, places: Mapping[fx.Node, fx.Node], sizes: SizeTable
    ) -> dict[fx.Node, fx.Node]:
        """Row inputs in the shape that the ops were written for; also teaches ``sizes``."""
        rows: fx.Node | None = None
        shaped = {}
        for node in self.token_dims:
            place = places[node]
            if rows is None:
                rows = graph.call_function(aten.sym_size.int, (place, 0))
                for dim, size in enumerate(self.sizes):
                    sizes.know(size, rows if dim == self.carrier else 1)
            lead: list[Any] = [rows if d == self.carrier else 1 for d in range(len(self.sizes))]
            rest = []
            for dim, size in enumerate(shape_of(node)[len(self.sizes) :], 1):
                if not isinstance(size, int):
                    sizes.know(size, graph.call_function(aten.sym_size.int, (place, dim)))
                rest.append(sizes.arg(size))
            shaped[node] = graph.call_function(aten.view.default, (place, [*lead, *rest]))
        return shaped

    def flatten_outputs(
        self, graph: fx.Graph, found: Sequence[fx.Node], results: Sequence[Any], sizes: SizeTable
    ) -> tuple[fx.Node, ...]:
        """Results ``[rows, ...]``."""
        flat = []
        for node, result in zip(found, results, strict=True):
            rest = [sizes.arg(size) for size in shape_of(node)[len(self.sizes) :]]
            shape = [sizes.arg(self.sizes[self.carrier]), *rest]
            flat.append(graph.call_function(aten.reshape.default, (result, shape)))
        return tuple(flat)

    # -- around the call
    def flatten_inputs(
        self, graph: fx.Graph, inputs: Sequence[fx.Node], sizes: SizeTable
    ) -> list[fx.Node]:
        """The call's inputs, those with tokens as ``[rows, ...]``."""
        return [
            self._reshape(graph, node, self.rows_val(node), sizes)
            if node in self.token_dims
            else node
            for node in inputs
        ]

    def restore(
        self,
        graph: fx.Graph,
        outputs: Sequence[fx.Node],
        values: Sequence[fx.Node],
        sizes: SizeTable,
    ) -> list[fx.Node]:
        """The call's results in the shapes of the graph's own values."""
        restored = []
        for node, value in zip(outputs, values, strict=True):
            val = tensor_val(node)
            assert val is not None
            restored.append(self._reshape(graph, value, val, sizes))
        return restored

    @staticmethod
    def _reshape(graph: fx.Graph, node: fx.Node, like: torch.Tensor, sizes: SizeTable) -> fx.Node:
        shape = [sizes.arg(size) for size in like.shape]
        if any(size is None for size in shape):
            raise TileRefusal(
                f"the sizes {_show(tuple(like.shape))} cannot be written in the graph"
            )
        result = graph.call_function(aten.reshape.default, (node, shape))
        result.meta["val"] = like
        return result


def _show(sizes: tuple[Size, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
