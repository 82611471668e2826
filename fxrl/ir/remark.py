"""What the passes say: every site gets exactly one remark, applied or missed.

The vocabulary is LLVM's (applied/passed, missed, analysis). A report is immutable; ``str`` (a
table) is for people, ``to_json`` (one object per line) is for tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table

from fxrl.ir.table import Readable, cell, open_table, plain_text

if TYPE_CHECKING:
    from torch import fx

_EMPTY = (
    "no remarks: nothing is captured yet (call the step on a batch first), or no pass found a site"
)
_NARROW = 100  # columns below which a reason would be squeezed into a few of them
_STYLES = {"applied": "green", "missed": "yellow", "analysis": "cyan"}


class Refusal(Exception):
    """How any part of fxrl says no: reason and cure, for people, and the graph value at fault."""

    def __init__(self, reason: str, cure: str = "", at: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cure = cure
        self.at = at  # the value that forbids the rewrite; None where it is the site itself


class RemarkKind(StrEnum):
    """``applied``: rewritten. ``missed``: recognised and left alone. ``analysis``: a fact."""

    APPLIED = "applied"
    MISSED = "missed"
    ANALYSIS = "analysis"


@dataclass(frozen=True, slots=True)
class Remark:
    """One pass's word on one site.

    Attributes:
        kind: ``applied``, ``missed`` or ``analysis`` (compares equal to the plain string).
        pass_name: such as ``"fuse-linear-logprob"``.
        site: its name, such as ``"0:model.layers.3"``, ``"0:mm_14"`` or ``"loss"``.
        source: the user's ``file:line``, empty when the graph does not know it.
        reason: what was done, or why nothing was.
        cure: what the user can do about a miss; empty when nothing or not needed.
        saved_bytes: predicted bytes that no longer live at the peak.
    """

    kind: RemarkKind
    pass_name: str
    site: str
    source: str = ""
    reason: str = ""
    cure: str = ""
    saved_bytes: int = 0

    def __str__(self) -> str:
        saved = f" (saves {format_bytes(self.saved_bytes)})" if self.saved_bytes else ""
        cure = f"; {self.cure}" if self.cure else ""
        where = f" [{self.source}]" if self.source else ""
        return f"{self.kind}: {self.pass_name} @ {self.site}{where}: {self.reason}{cure}{saved}"


@dataclass(frozen=True, slots=True)
class Report(Readable):
    """All remarks of one or more captures, in the order the passes made them."""

    remarks: tuple[Remark, ...] = ()

    def __add__(self, other: Report) -> Report:
        return Report(self.remarks + other.remarks)

    def of_kind(self, kind: RemarkKind | str) -> tuple[Remark, ...]:
        """The remarks of one kind."""
        return tuple(remark for remark in self.remarks if remark.kind == kind)

    def settled(self) -> Report:
        """The same, with misses at sites that another pass rewrote turned into facts."""
        rewritten = {remark.site for remark in self.of_kind(RemarkKind.APPLIED)}

        def of(remark: Remark) -> Remark:
            taken = remark.kind == RemarkKind.MISSED and remark.site in rewritten
            return replace(remark, kind=RemarkKind.ANALYSIS) if taken else remark

        return Report(tuple(map(of, self.remarks)))

    def folded(self) -> tuple[Remark, ...]:
        """The remarks as people read them: ``settled``, and merged where several passes say the
        same of one site, or one pass of many sites."""
        sites = _grouped(self.settled().remarks, lambda one: (one.site, one.source))
        passes = _grouped(map(_of_passes, sites), lambda one: (one.pass_name,))
        return tuple(map(_of_sites, passes))

    @property
    def saved_bytes(self) -> int:
        """Predicted bytes saved by everything applied."""
        return sum(remark.saved_bytes for remark in self.of_kind(RemarkKind.APPLIED))

    def to_json(self) -> str:
        """JSON lines, one remark each."""
        return "\n".join(json.dumps(asdict(remark)) for remark in self.remarks)

    @classmethod
    def of(cls, remarks: Iterable[Remark]) -> Report:
        """A report over any iterable of remarks."""
        return cls(tuple(remarks))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, coloured by verdict: ``rich.print(report)``."""
        if not self.remarks:
            yield cell(_EMPTY)
            return
        folded = Report(self.folded())
        if options.max_width < _NARROW:
            yield from _blocks(folded.remarks)
        else:
            yield _table(folded.remarks)
        yield cell("")
        yield cell(f"predicted to save {format_bytes(self.saved_bytes)} at the peak", "bold")
        counts = (f"{len(folded.of_kind(kind))} {kind}" for kind in RemarkKind)
        told = len(folded.remarks)
        alike = f" in {told} entries" if told < len(self.remarks) else ""
        yield cell(f"{len(self.remarks)} remarks{alike}: {', '.join(counts)}")

    def table(self, width: int | None = None) -> str:
        """The table as plain text, ``width`` columns wide (``None``: as the terminal)."""
        return plain_text(self, width)

    def __str__(self) -> str:
        return self.table()


def _grouped(
    remarks: Iterable[Remark], alike: Callable[[Remark], tuple[str, ...]]
) -> Iterable[list[Remark]]:
    """Groups of remarks that say the same and agree in ``alike``."""
    groups: dict[tuple[str, ...], list[Remark]] = {}
    for one in remarks:
        groups.setdefault((one.kind, one.reason, one.cure, *alike(one)), []).append(one)
    return groups.values()


def _of_passes(remarks: list[Remark]) -> Remark:
    names = ", ".join(dict.fromkeys(one.pass_name for one in remarks))
    return replace(remarks[0], pass_name=names, saved_bytes=max(r.saved_bytes for r in remarks))


def _of_sites(remarks: list[Remark]) -> Remark:
    first, last = remarks[0], remarks[-1]
    if len(remarks) == 1:
        return first
    site = f"{first.site} to {last.site}" if len(remarks) > 2 else f"{first.site}, {last.site}"
    return replace(first, site=site, saved_bytes=sum(one.saved_bytes for one in remarks))


def _table(remarks: Iterable[Remark]) -> Table:
    columns = ("pass", "site", "source", "verdict", "saved", "reason and cure")
    table = open_table(*columns, right=("saved",), fixed=("pass", "verdict", "saved"))
    for remark in remarks:
        table.add_row(
            cell(remark.pass_name.replace(", ", ",\n")),
            cell(remark.site),
            cell(remark.source, "dim"),
            cell(remark.kind, _STYLES[remark.kind]),
            cell(_saved(remark)),
            cell(_reason(remark)),
        )
    return table


def _blocks(remarks: Iterable[Remark]) -> Iterator[RenderableType]:
    """What no table holds in so few columns: each remark's parts on lines of their own."""
    for remark in remarks:
        saves = "saves" if remark.kind == RemarkKind.APPLIED else "would save"
        saved = f", {saves} {format_bytes(remark.saved_bytes)}" if remark.saved_bytes else ""
        yield cell(remark.kind, _STYLES[remark.kind]) + cell(f" {remark.pass_name}{saved}")
        lines = filter(None, (remark.site, remark.source, _reason(remark)))
        yield Padding(cell("\n".join(lines)), (0, 0, 0, 2))


def _saved(remark: Remark) -> str:
    """The predicted saving; what a miss would have saved stands in parentheses."""
    if not remark.saved_bytes:
        return ""
    saved = format_bytes(remark.saved_bytes)
    return saved if remark.kind == RemarkKind.APPLIED else f"({saved})"


def _reason(remark: Remark) -> str:
    return f"{remark.reason}\ncure: {remark.cure}" if remark.cure else remark.reason


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
