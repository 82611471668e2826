"""What ``verify`` found: one row for every value compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from fxrl.errors import VerificationError
from fxrl.ir.table import cell, open_table, plain_text

_SHOWN = 12  # rows that are ok and still shown: the worst ones


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One value of the optimized step against its reference.

    Attributes:
        name: ``"loss"``, a metric, a parameter, ``batch[...]``, a buffer, ``"all gradients"``.
        kind: ``"loss"``, ``"metric"``, ``"gradient"``, ``"buffer"`` or ``"total"``.
        max_abs: largest absolute error of an element.
        rel: norm of the error over the norm of the reference (see ``compare.scale_of``).
        tolerance: largest ``rel`` that is accepted.
        ok: ``rel <= tolerance``.
        eager_rel: ``rel`` of eager itself, where the reference is a wider run; else ``None``.
        note: such as ``"no gradient in the step"``.
    """

    name: str
    kind: str
    max_abs: float
    rel: float
    tolerance: float
    ok: bool
    eager_rel: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdict on one batch.

    Attributes:
        ok: every row is.
        rows: all values compared.
        blame: sites whose rewrite makes the step wrong; empty if ``ok`` or if unknown.
        reference: what the step is compared with: ``"eager"``, ``"float32"`` or ``"float64"``.
        notes: what a reader must know to trust the verdict.
    """

    ok: bool
    rows: tuple[VerifyRow, ...]
    blame: tuple[str, ...] = ()
    reference: str = "eager"
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[VerifyRow, ...]:
        """The rows that are not ok."""
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

    def table(self, width: int | None = None) -> str:
        """The table as plain text, ``width`` columns wide (``None``: as the terminal)."""
        return plain_text(self, width)

    def __str__(self) -> str:
        return self.table()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, coloured by verdict: ``rich.print(report)``."""
        shown = _most_telling(self.rows)
        yield _table(shown, against_wider=self.reference != "eager")
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
    """All that failed, then the loss, metrics and total, then the gradients nearest to failing."""

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
        verdict = cell("ok", "green") if row.ok else cell("WRONG", "red")
        table.add_row(*map(cell, texts), cell(_number(row.tolerance)), verdict, cell(row.note))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _json_number(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
