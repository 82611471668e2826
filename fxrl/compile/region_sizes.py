"""The sizes of a region that vary, by name: where they are read and what sizes made of them are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxrl.ir.graph import Size
from fxrl.ir.region import Region


def symbol_places(region: Region) -> Iterator[tuple[str, int, int]]:
    """Symbol, input and dim of every size that is one symbol."""
    for index, spec in enumerate(region.inputs):
        for dim, size in enumerate(spec.example.shape):
            if spec.tiled and dim == 0:
                yield "rows", index, 0
            elif isinstance(size, torch.SymInt) and not size.node.expr.is_Integer:
                yield str(size.node.expr), index, dim


class SizePlaces:
    """Where each size that varies is read; looked up once, for calls are many.

    Attributes:
        names: the symbols, in a fixed order.
    """

    def __init__(self, region: Region) -> None:
        places = {name: (index, dim) for name, index, dim in symbol_places(region)}
        self.names = tuple(places)
        self._places = tuple(places.values())

    def read(self, inputs: Sequence[Tensor]) -> tuple[Size, ...]:
        """What the symbols are in these inputs; symbols themselves where the inputs are fake."""
        return tuple(inputs[index].shape[dim] for index, dim in self._places)


def size_at(size: Size, sizes: Mapping[str, Size]) -> Size:
    """A size of the outer graph where its symbols are ``sizes`` (numbers, or symbols again)."""
    return size if isinstance(size, int) else _evaluate(size.node.expr, sizes)


def _evaluate(expr: Any, sizes: Mapping[str, Size]) -> Size:
    if expr.is_Integer:
        return int(expr)
    if str(expr) in sizes:
        return sizes[str(expr)]
    assert expr.is_Add or expr.is_Mul, f"the size {expr} is no sum or product"
    parts = [_evaluate(part, sizes) for part in expr.args]
    total = parts[0]
    for part in parts[1:]:
        total = total + part if expr.is_Add else total * part
    return total
