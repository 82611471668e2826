"""How far two runs are apart, and how far they may be.

NOTE [Which tolerance]
Rounding makes two correct programs differ. With unit roundoff ``eps`` of the coarsest dtype that
modules return or the captured graph rounds to, ``eps_acc`` of the one it accumulates in (float32
for half precision), ``D`` roundings along a path (leaf modules run) and reductions of at most ``K``
terms, independent roundings grow with the square root of their number (Higham and Mary, SIAM J.
Sci. Comput. 41(5), 2019):

    tolerance = 2 (eps sqrt(D) + c eps_acc sqrt(K))

2 for two programs, each with its error; ``c`` for cancellation, 4 in a loss and 16 in a gradient.
For a 12-layer bf16 model this is the 15 to 20 % by which two correct runs were seen to differ.
Where all is float64 rounding is no excuse: 1e-9 for losses, 1e-7 for gradients, at all sizes.

NOTE [Which reference]
15 % hides many mistakes. For half precision the step is therefore compared with a run of the same
model in float32 (or float64), the truth, and so is eager: the step passes if it is no further from
the truth than twice eager. Eager can be near the truth by luck in one tensor, so its error counts
as at least its error over all gradients; errors of ``n`` numbers scatter by ``1 / sqrt(n)``, so the
factor is ``2 (1 + 3 / sqrt(n))``; and one ``eps`` is granted for rounding the result.

NOTE [Which tolerance behind products in FP8]
Numbers of e4m3 are up to ``u = 2^-3`` apart, relative to the smaller. Two values that differ by
``d`` of themselves are rounded to different ones with a probability of ``d / u`` at least, and then
differ by ``u``: so a relative difference ``d`` becomes ``sqrt(d / u) u = sqrt(u d)`` as a root
mean square, however small it was: 1e-4 for one ``eps`` of float32. Reference and step round alike
(``_References`` in ``verify``), so this, and no 3 % for each product, is what two correct runs
differ by; it replaces the tolerance, and the ``eps`` that is granted for rounding the result. What
it grows to in further products the wider run tells, which float32 therefore has here, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fxrl.errors import VerificationError
from fxrl.inspect.evaluate import Outcome
from fxrl.ir.table import Readable, cell, open_table, plain_text

_CANCELLATION = {"loss": 4.0, "gradient": 16.0}
_E4M3 = 2.0**-3  # the largest distance of its numbers, relative to the smaller
_FLOAT64 = {"loss": 1e-9, "gradient": 1e-7}
_SCATTER = 3.0  # standard deviations by which the error of few numbers may scatter
_FACTOR = 2.0  # how much further from the truth than eager the step may be
_SMALL = 1e-2  # a gradient with less than this part of the whole norm is measured against that


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Accepted relative errors (see NOTE [Which tolerance])."""

    dtype: torch.dtype  # what the model computes in
    depth: int  # ``D``, leaf modules run
    terms: int  # ``K``, terms of the longest reduction
    rounded: bool = False  # products are in FP8, on both sides

    def at(self, dtype: torch.dtype) -> Tolerances:
        """The same for a value whose own ``dtype`` is coarser than what the model computes in."""
        coarser = dtype.is_floating_point and torch.finfo(dtype).eps > self.eps
        return replace(self, dtype=dtype) if coarser else self

    def of(self, kind: str) -> float:
        """The tolerance for ``"loss"`` (also metrics and buffers) or ``"gradient"``."""
        if self.dtype is torch.float64:
            return _FLOAT64[kind]
        accumulate = torch.finfo(torch.float32).eps
        paths = self.eps * math.sqrt(max(self.depth, 1))
        sums = accumulate * math.sqrt(max(self.terms, 1))
        return self._grown(2 * (paths + _CANCELLATION[kind] * sums))

    def of_result(self, kind: str) -> float:
        """The tolerance for a result, which is only rounded."""
        return min(self._grown(self.eps), self.of(kind))

    def _grown(self, difference: float) -> float:
        return max(difference, math.sqrt(_E4M3 * difference)) if self.rounded else difference

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number of ``dtype``."""
        return torch.finfo(self.dtype).eps


def compare(
    ours: Outcome, eager: Outcome, truth: Outcome | None, tolerances: Tolerances
) -> tuple[VerifyRow, ...]:
    """One row a value: loss, metrics, gradients, their total, buffers that a run changed."""
    scalars = _Judge(ours, eager, truth, tolerances, "loss")
    wide = truth.loss if truth else None
    rows = [scalars.scalar("loss", "loss", ours.loss, eager.loss, wide)]
    for name in dict.fromkeys((*eager.metrics, *ours.metrics)):
        wide = truth.metrics.get(name) if truth else None
        rows.append(
            scalars.scalar(name, "metric", ours.metrics.get(name), eager.metrics.get(name), wide)
        )
    rows += _Judge(ours, eager, truth, tolerances, "gradient").gradients()
    # Buffers of the wider run are copies that nobody sees: always against eager.
    direct = _Judge(ours, eager, None, tolerances, "loss")
    for name in dict.fromkeys((*eager.buffers, *ours.buffers)):
        values = ours.buffers.get(name), eager.buffers.get(name)
        rows.append(direct.scalar(name, "buffer", *values, None))
    return tuple(rows)


class _Judge:
    """Turns errors into rows under one rule."""

    def __init__(
        self, ours: Outcome, eager: Outcome, truth: Outcome | None, tol: Tolerances, kind: str
    ) -> None:
        self._ours, self._eager, self._truth = ours, eager, truth
        self._tolerances, self._kind = tol, kind

    def scalar(
        self, name: str, kind: str, ours: Tensor | None, eager: Tensor | None, truth: Tensor | None
    ) -> VerifyRow:
        """A loss, metric or buffer: relative to at least 1, as log-probabilities are of order 1.

        A loss may be a small difference of such terms, which no program gets relatively right.
        """
        if ours is None or eager is None or ours.shape != eager.shape:
            note = f"{_described(ours)} in the step, {_described(eager)} in eager"
            allowed = self._tolerances.of(self._kind)
            return VerifyRow(name, kind, math.inf, math.inf, allowed, False, None, note)
        reference = eager if truth is None or truth.shape != eager.shape else truth
        scale = max(_norm(reference), math.sqrt(reference.numel()))
        error = None if reference is eager else _distance(eager, reference) / scale
        return self._row(name, kind, ours, reference, scale, (error, error))

    def gradients(self) -> list[VerifyRow]:
        """Every gradient, then all as one vector; a missing gradient counts as zeros."""
        reference = self._truth or self._eager
        total = math.hypot(*(_norm(g) for g in reference.grads.values() if g is not None), 0.0)
        count = sum(g.numel() for g in reference.grads.values() if g is not None)
        typical = self._distance_of_all(self._eager) / (total or 1.0) if self._truth else None
        rows: list[VerifyRow] = []
        coarsest = self._tolerances.dtype
        for name, ours in self._ours.grads.items():
            eager, wanted = self._eager.grads.get(name), reference.grads.get(name)
            if ours is None and eager is None:
                continue
            like = next(g for g in (ours, eager) if g is not None)
            ours_, eager_, wanted_ = (_or_zeros(g, like) for g in (ours, eager, wanted))
            scale = self.scale_of(wanted_, total)
            error = _distance(eager_, wanted_) / scale if self._truth else None
            row = self._row(name, "gradient", ours_, wanted_, scale, (error, typical))
            missing = "the step" if ours is None else "eager" if eager is None else ""
            rows.append(replace(row, note=f"no gradient in {missing}" if missing else ""))
            coarsest = max(coarsest, eager_.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        if rows:
            rel = self._distance_of_all(self._ours) / (total or 1.0)
            tolerance = self._allowed(torch.empty(count, dtype=coarsest, device="meta"), typical)
            largest = max(row.max_abs for row in rows)
            total_ok = rel <= tolerance
            rows.append(
                VerifyRow("all gradients", "total", largest, rel, tolerance, total_ok, typical)
            )
        return rows

    def scale_of(self, gradient: Tensor, total: float) -> float:
        """What a gradient's error is relative to: its norm, but not less than noise has.

        Some gradients are zero by mathematics (the key bias under softmax): they hold only the
        rounding of larger terms. So the least scale is ``_SMALL`` of the norm of all gradients,
        ten times that for one number, in which a whole batch cancels.
        """
        least = _SMALL * total * max(1.0, 10 / math.sqrt(max(gradient.numel(), 1)))
        return max(_norm(gradient), least, torch.finfo(torch.float32).tiny)

    def _row(
        self,
        name: str,
        kind: str,
        ours: Tensor,
        reference: Tensor,
        scale: float,
        eager: tuple[float | None, float | None],
    ) -> VerifyRow:
        """``eager``: its own relative error here, and over all (``None``: it is the reference)."""
        rel = _distance(ours, reference) / scale
        tolerance = self._allowed(reference, *eager)
        largest = float(_error(ours, reference).abs().max()) if ours.numel() else 0.0
        return VerifyRow(name, kind, largest, rel, tolerance, rel <= tolerance, eager[0])

    def _allowed(self, value: Tensor, *eager: float | None) -> float:
        measured = [error for error in eager if error is not None]
        tolerances = self._tolerances.at(value.dtype)
        if not measured:
            return tolerances.of(self._kind)
        rounding = tolerances.of_result(self._kind)
        scatter = 1 + _SCATTER / math.sqrt(max(value.numel(), 1))
        return _FACTOR * scatter * max(measured) + rounding

    def _distance_of_all(self, run: Outcome) -> float:
        reference = (self._truth or self._eager).grads
        distances = [0.0]
        for name, grad in run.grads.items():
            wanted = reference.get(name)
            if (like := grad if grad is not None else wanted) is not None:
                distances.append(_distance(_or_zeros(grad, like), _or_zeros(wanted, like)))
        return math.hypot(*distances)


def _error(ours: Tensor, reference: Tensor) -> Tensor:
    """Difference in float64; equal infinities and NaNs on both sides differ by 0, else by inf."""
    a, b = _wide(ours), _wide(reference)
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).nan_to_num(math.inf, math.inf, math.inf).masked_fill(same, 0.0)


def _distance(ours: Tensor, reference: Tensor) -> float:
    return float(_error(ours, reference).norm())


def _wide(tensor: Tensor) -> Tensor:
    """``tensor`` in float64; a complex number as its two parts."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


def _norm(tensor: Tensor) -> float:
    """Norm of the finite part."""
    return float(_wide(tensor).nan_to_num(0.0, 0.0, 0.0).norm())


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _described(value: Tensor | None) -> str:
    return "missing" if value is None else f"shape {tuple(value.shape)}"


_NARROW = 100  # columns below which parameters' names would be squeezed into a few of them
_SHOWN = 12  # rows that are ok and still shown: the worst ones


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One value of the optimized step against its reference."""

    name: str  # ``"loss"``, a metric, a parameter, ``batch[...]``, a buffer, ``"all gradients"``
    kind: str  # ``"loss"``, ``"metric"``, ``"gradient"``, ``"buffer"`` or ``"total"``
    max_abs: float  # largest absolute error of an element
    rel: float  # norm of the error over the norm of the reference (see ``_Judge.scale_of``)
    tolerance: float  # largest ``rel`` that is accepted
    ok: bool  # ``rel <= tolerance``
    # ``rel`` of eager itself, where the reference is a wider run; else ``None``.
    eager_rel: float | None = None
    note: str = ""  # such as ``"no gradient in the step"``


@dataclass(frozen=True, slots=True)
class VerifyReport(Readable):
    """The verdict on one batch."""

    ok: bool  # every row is
    rows: tuple[VerifyRow, ...]  # all values compared
    # Sites whose rewrite makes the step wrong; empty if ``ok`` or if unknown.
    blame: tuple[str, ...] = ()
    # What the step is compared with: ``"eager"``, ``"float32"`` or ``"float64"``.
    reference: str = "eager"
    notes: tuple[str, ...] = ()  # what a reader must know to trust the verdict

    @property
    def failed(self) -> tuple[VerifyRow, ...]:
        return tuple(row for row in self.rows if not row.ok)

    def raise_if_failed(self) -> None:
        """Raise ``VerificationError`` with the whole table unless ``ok``."""
        if not self.ok:
            raise VerificationError(str(self))

    def to_json(self) -> str:
        """One JSON object; numbers that JSON lacks are the strings ``"inf"`` and ``"nan"``."""
        fields = asdict(self)
        fields["rows"] = [{k: _json_number(v) for k, v in row.items()} for row in fields["rows"]]
        return json.dumps(fields, allow_nan=False)

    def __str__(self) -> str:
        return plain_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, coloured by verdict: ``rich.print(report)``."""
        shown = _most_telling(self.rows)
        against_wider = self.reference != "eager"
        if options.max_width < _NARROW:
            yield from _blocks(shown, against_wider=against_wider)
        else:
            yield _table(shown, against_wider=against_wider)
        if len(shown) < len(self.rows):
            yield cell(f"and {len(self.rows) - len(shown)} more, all ok and nearer", "dim")
        yield cell("")
        yield cell(self._verdict(), "bold green" if self.ok else "bold red")
        for note in self.notes:
            yield cell(f"note: {note}")

    def _verdict(self) -> str:
        against = "eager" if self.reference == "eager" else f"a {self.reference} run of the model"
        if self.ok:
            return f"ok: {len(self.rows)} values agree with {against}"
        blame = f"; to blame: {', '.join(self.blame)}" if self.blame else ""
        return f"FAILED: {len(self.failed)} of {len(self.rows)} values miss {against}{blame}"


def _most_telling(rows: Iterable[VerifyRow]) -> list[VerifyRow]:
    """The rows to show: all that failed, the loss, metrics and total, then gradients nearest to
    failing."""

    def order(row: VerifyRow) -> tuple[bool, bool, float]:
        return row.ok, row.kind in ("gradient", "buffer"), -_used(row)

    ranked = sorted(rows, key=order)
    failed = sum(not row.ok for row in ranked)
    summary = sum(row.ok and row.kind not in ("gradient", "buffer") for row in ranked)
    return ranked[: failed + max(_SHOWN, summary)]


def _used(row: VerifyRow) -> float:
    """Share of the tolerance that the error uses up."""
    return row.rel / row.tolerance if row.tolerance else math.inf * bool(row.rel)


def _table(rows: Iterable[VerifyRow], *, against_wider: bool) -> Table:
    numbers = ["max abs", "rel", *(["eager's rel"] if against_wider else []), "tolerance"]
    table = open_table("value", "kind", *numbers, "verdict", "", right=tuple(numbers))
    for row in rows:
        eager = [_number(row.eager_rel)] if against_wider else []
        texts = [row.name, row.kind, _number(row.max_abs), _number(row.rel), *eager]
        table.add_row(*map(cell, texts), cell(_number(row.tolerance)), _ok(row), cell(row.note))
    return table


def _ok(row: VerifyRow) -> Text:
    return cell("ok", "green") if row.ok else cell("WRONG", "red")


def _blocks(rows: Iterable[VerifyRow], *, against_wider: bool) -> Iterator[RenderableType]:
    """What no table holds in so few columns: a value's name, then its numbers in columns."""

    def line(kind: str, max_abs: str, rel: str, eager_rel: str, tolerance: str) -> Text:
        eager = f"{eager_rel:>13}" if against_wider else ""
        return cell(f"  {kind:8}{max_abs:>11}{rel:>11}{eager}{tolerance:>11}  ")

    yield cell("value")
    yield line("kind", "max abs", "rel", "eager's rel", "tolerance") + cell("verdict\n")
    for row in rows:
        numbers = (row.max_abs, row.rel, row.eager_rel, row.tolerance)
        yield cell(row.name)
        yield line(row.kind, *map(_number, numbers)) + _ok(row)
        if row.note:
            yield cell(f"  {row.note}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _json_number(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
