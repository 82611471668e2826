"""The yardstick of the head benchmark: cuBLAS's time for the products no exact head can do without.

NOTE [What the floor is made of]
Three products of 2NHV FLOPs, by ``torch.mm`` in the inputs' dtype, on the inputs' own values:

    logits  [N, V] = hidden weight^T                     always once; twice where they are remade
    dH      [N, H] = G weight                            if the hidden states want a gradient
    dW      [V, H] = G^T hidden                          if the head wants one

G, the gradient of the logits, has the size of the logits; here it holds the softmax of the first
set, stored in bf16 as an implementation would feed it to the tensor cores. Each product is tried
whole and cut into tiles of rows or columns that stay independent (no partial sums), and with the
logits (or G) row-major and column-major; the fastest of all these is taken. So the floor depends on
no choice of ours, and an implementation that keeps the logits out of memory may even beat it.

A mode's floor is the median of its products run one after the other, over rotated sets: the chip is
then as warm as it is under an implementation. Where G would exceed 8 GiB the tokens are cut and the
time is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from bench.lib import common
from bench.lib.head_inputs import Inputs

PRODUCTS = ("logits", "dh", "dw")
_MOST_BYTES = 8 * 2**30
_CUTS = (None, 16384, 8192, 4096, 2048)


@dataclass
class _Operands:
    """What the products read and write; ``rows`` of each set's tokens."""

    sets: Sequence[tuple[Tensor, Tensor]]
    by_row: Tensor  # [n, V], G
    by_column: Tensor  # the same values, V major
    logits: Tensor  # [n, V], where logits go, so that G stays what it is
    dh: Tensor
    dw: Tensor
    turn: Iterator[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = cycle(self.sets)


@dataclass(frozen=True)
class _Way:
    """One way to a product: rows (columns, for dW's vocabulary) at a time, and G's layout."""

    product: str
    cut: int | None
    axis: str
    row_major: bool

    def __str__(self) -> str:
        cut = f"{self.axis} by {self.cut}" if self.cut else "whole"
        return f"{self.product}: {cut}, {'row' if self.row_major else 'column'}-major"

    def run(self, at: _Operands) -> None:
        hidden, weight = next(at.turn)
        grid = at.by_row if self.row_major else at.by_column
        if self.product == "logits":
            grid = at.logits if self.row_major else at.logits.view(grid.t().shape).t()
        length = grid.shape[0] if self.axis == "tokens" else grid.shape[1]
        for start in range(0, length, self.cut or length):
            part = slice(start, start + (self.cut or length))
            if self.product == "logits" and self.axis == "tokens":
                _logits(hidden[part], weight, grid[part])
            elif self.product == "logits":
                _logits(hidden, weight[part], grid[:, part])
            elif self.product == "dh":
                torch.mm(grid[part], weight, out=at.dh[part])
            else:
                torch.mm(grid[:, part].t(), hidden, out=at.dw[part])


def _logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out`` in its own layout: cuBLAS writes column-major ones as the transposed product."""
    if out.stride(1) == 1:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.mm(weight, hidden.t(), out=out.t())


@dataclass(frozen=True)
class Floor:
    """Milliseconds.

    Attributes:
        products: of each product alone, the fastest way.
        ways: that way in words.
        sequences: of the products of a mode one after the other, by how often each runs.
        scale: tokens asked for over tokens measured.
    """

    products: dict[str, float]
    ways: dict[str, str]
    sequences: dict[tuple[int, int, int], float]
    scale: float

    def of(self, counts: tuple[int, int, int]) -> float:
        """The floor of ``counts`` = times of (logits, dH, dW)."""
        return self.sequences[counts]


def measure(
    sets: Sequence[Inputs],
    wanted: Sequence[tuple[int, int, int]],
    device: str,
    repeats: int,
) -> Floor:
    """The fastest way to each product in ``wanted``, then each of ``wanted`` as one sequence.

    Args:
        sets: input sets, used in turn.
        wanted: how often each of ``PRODUCTS`` runs, for each mode.
        device: "cuda" or "cpu".
        repeats: of the sequences; a way is tried three times.
    """
    operands = _operands(sets)
    scale = len(sets[0].hidden) / len(operands.by_row)
    best: dict[str, tuple[float, _Way]] = {}
    needed = [name for i, name in enumerate(PRODUCTS) if any(counts[i] for counts in wanted)]
    for name in needed:
        timed = [
            (common.median_ms(_call(way, operands), device, warmup=1, repeats=3), way)
            for way in _ways(name, operands)
        ]
        best[name] = min(timed, key=lambda pair: pair[0])
    sequences = {}
    for counts in dict.fromkeys(wanted):
        order = [
            best[name][1]
            for name, times in zip(PRODUCTS, counts, strict=True)
            for _ in range(times)
        ]
        sequences[counts] = scale * common.median_ms(
            _sequence(order, operands), device, warmup=1, repeats=repeats
        )
    return Floor(
        {name: scale * ms for name, (ms, _) in best.items()},
        {name: str(way) for name, (_, way) in best.items()},
        sequences,
        scale,
    )


def _call(way: _Way, operands: _Operands) -> Callable[[], None]:
    return lambda: way.run(operands)


def _sequence(order: Sequence[_Way], operands: _Operands) -> Callable[[], None]:
    def run() -> None:
        for way in order:
            way.run(operands)

    return run


def _ways(name: str, at: _Operands) -> list[_Way]:
    """All that keep the parts independent; a cut that is no cut is left out."""
    axes = {"logits": ("tokens", "vocab"), "dh": ("tokens",), "dw": ("vocab",)}[name]
    found = []
    for axis in axes:
        length = at.by_row.shape[0 if axis == "tokens" else 1]
        cuts = [cut for cut in _CUTS if cut is None or cut < length]
        found += [_Way(name, cut, axis, row) for cut in cuts for row in (True, False)]
    return list(
        dict.fromkeys(w if w.cut else _Way(name, None, axes[0], w.row_major) for w in found)
    )


def _operands(sets: Sequence[Inputs]) -> _Operands:
    first = sets[0]
    hidden, weight = first.hidden.detach(), first.weight.detach()
    num_vocab = weight.shape[0]
    count = min(len(hidden), max(1, _MOST_BYTES // (num_vocab * hidden.element_size())))
    by_row = hidden.new_empty(count, num_vocab)
    by_column = hidden.new_empty(num_vocab, count).t()
    step = max(1, 2**28 // num_vocab)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        by_row[part] = (hidden[part] @ weight.t()).float().softmax(-1).to(hidden.dtype)
        by_column[part] = by_row[part]
    return _Operands(
        [(each.hidden.detach()[:count], each.weight.detach()) for each in sets],
        by_row,
        by_column,
        torch.empty_like(by_row),
        hidden.new_empty(count, hidden.shape[1]),
        torch.empty_like(weight),
    )
