"""What a run shows: a live view on a terminal, lines in a log file, or JSON lines for tools."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fxrl.ir.remark import RemarkKind, Report, format_bytes
from fxrl.rl.metrics import jsonable
from fxrl.rl.timing import PHASES

COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("±", "reward_std", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("KL", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("length", "completions/mean_length", "{:.1f}"),
    ("|grad|", "grad_norm", "{:.3f}"),
    ("tok/s", "tokens_per_second", "{:.0f}"),
    ("drift", "sampling/sampling_logp_difference/mean", "{:.4f}"),
    ("s", "step_time", "{:.1f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
)
RECENT_STEPS = 8


class Reporter(Protocol):
    """How a run tells what happens; used as a context manager around the loop."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def message(self, text: str) -> None:
        """A sentence for the user."""

    def report(self, report: Report) -> None:
        """What ``fxrl.optimize`` did, after the first step."""

    def step(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """One step's metrics and sample completions."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """The end of the run."""


class JsonReporter:
    """One JSON object per event; a step's line is its line of ``metrics.jsonl``."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _line(self, event: str, values: Mapping[str, Any]) -> None:
        plain = {key: jsonable(value) for key, value in values.items()}
        self.console.out(json.dumps({"event": event, **plain}), highlight=False)

    def message(self, text: str) -> None:
        """See ``Reporter``."""
        self._line("message", {"text": text})

    def report(self, report: Report) -> None:
        """See ``Reporter``."""
        for line in report.to_json().splitlines():
            self._line("remark", json.loads(line))

    def step(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """See ``Reporter``."""
        self._line("step", record)

    def summary(self, values: Mapping[str, Any]) -> None:
        """See ``Reporter``."""
        self._line("summary", values)


class RichReporter:
    """Live on a terminal; elsewhere a line per step and tables now and then.

    Args:
        console: where to.
        total: steps of the run.
        done: steps already done (a resumed run).
    """

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self.console, self.total = console, total
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._samples: Sequence[Mapping[str, Any]] = ()
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=total, completed=done)
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            if self._recent:
                self.console.print(steps_table(self._recent))
        if self._samples:
            self.console.print(completions_table(self._samples))

    def message(self, text: str) -> None:
        """See ``Reporter``."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def report(self, report: Report) -> None:
        """See ``Reporter``."""
        self.console.print(report_table(report))
        applied, missed = report.of_kind(RemarkKind.APPLIED), report.of_kind(RemarkKind.MISSED)
        self.message(
            f"fxrl: {len(applied)} applied, {len(missed)} missed, "
            f"{format_bytes(report.saved_bytes)} predicted to be saved at the peak"
        )

    def step(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """See ``Reporter``."""
        self._recent.append(record)
        first, self._samples = not self._samples, samples or self._samples
        self._progress.update(self._task, completed=record["step"])
        if self._live is not None:
            views: list[Any] = [self._progress, steps_table(self._recent), time_line(record)]
            if self._samples:
                views.append(completions_table(self._samples))
            self._live.update(Group(*views), refresh=True)
            return
        words = [f"{name} {_cell(record, key, form)}" for name, key, form in COLUMNS[1:]]
        shown = "  ".join(word for word in words if not word.endswith(" -"))
        self.message(f"step {record['step']}/{self.total}  {shown}  ({time_line(record)})")
        if first and self._samples:
            self.console.print(completions_table(self._samples))

    def summary(self, values: Mapping[str, Any]) -> None:
        """See ``Reporter``."""
        table = Table(title="summary", show_header=False)
        for name, value in values.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, Text(shown))
        self.console.print(table)


def steps_table(records: Sequence[Mapping[str, Any]] | deque[Mapping[str, Any]]) -> Table:
    """The last steps, a row each; columns without any value are left out."""
    table = Table()
    used = [c for c in COLUMNS if any(record.get(c[1]) is not None for record in records)]
    for name, _, _ in used:
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(*(_cell(record, key, form) for _, key, form in used))
    return table


def time_line(record: Mapping[str, Any]) -> str:
    """Where the step's seconds went, the largest part first; parts under a percent are left out."""
    seconds = {phase: record.get(f"time/{phase}") or 0.0 for phase in PHASES}
    total = sum(seconds.values())
    shown = sorted((p for p in PHASES if seconds[p] > total / 100), key=lambda p: -seconds[p])
    return ", ".join(f"{phase} {seconds[phase]:.2f} s" for phase in shown)


def completions_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Sample completions with reward and advantage."""
    table = Table(title="sample completions")
    table.add_column("prompt", max_width=48, overflow="ellipsis", no_wrap=True)
    table.add_column("completion", max_width=48, overflow="fold")
    table.add_column("reward", justify="right")
    table.add_column("advantage", justify="right")
    for sample in samples:
        prompt = Text(repr(sample["question"])[1:-1])
        reward = "-" if sample["reward"] is None else f"{sample['reward']:.2f}"
        completion = Text(repr(sample["completion"])[1:-1])
        table.add_row(prompt, completion, reward, f"{sample['advantage']:+.2f}")
    return table


def report_table(report: Report) -> Table:
    """What was applied and what was missed, and why."""
    table = Table(title="fxrl.optimize")
    table.add_column("")
    table.add_column("pass", no_wrap=True)
    table.add_column("where", overflow="fold")
    table.add_column("what, or why not", overflow="fold")
    table.add_column("saves", justify="right", no_wrap=True)
    for remark in report.remarks:
        why = f"{remark.reason}; {remark.cure}" if remark.cure else remark.reason
        where = f"{remark.site}\n{remark.source}".strip()
        saved = format_bytes(remark.saved_bytes) if remark.saved_bytes else ""
        table.add_row(str(remark.kind), remark.pass_name, Text(where), Text(why), saved)
    return table


def _cell(record: Mapping[str, Any], key: str, form: str) -> str:
    value = record.get(key)
    return "-" if value is None else form.format(value)
