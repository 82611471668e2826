"""What a run shows: a live view on a terminal, lines in a log file, or JSON lines for tools.

Importing it takes no PyTorch: that import is the first thing a run shows.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fxrl.ir.table import folded
from fxrl.rl.report.timing import PHASES

if TYPE_CHECKING:
    from fxrl.ir.remark import Report

Say = Callable[[str], None]
Stage = Callable[[str], AbstractContextManager[Say]]
"""``with stage("compiling: 3 bodies") as say: ...; say("compiling: 2 of 3 bodies")``. What is being
done until the block ends; stages nest, and ``say`` gives the innermost other words. A log gets a
line where the words before the colon are new, so numbers that change belong behind it."""
READING = "reading the configuration and the data"
QUIET_S = 10.0
"""A log in which nothing was written for so long gets a line that says what is being done; where
that has taken long already, for a quarter of its time."""

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
EXAMPLE_COLUMNS = (
    ("V loss", "value_loss", "{:.4f}"),
    ("V expl.", "explained_variance", "{:.3f}"),
    ("V clip", "value_clip_ratio", "{:.3f}"),
    ("accuracy", "mean_token_accuracy", "{:.3f}"),
    ("margin", "rewards/margins", "{:.3f}"),
    ("ranked right", "rewards/accuracies", "{:.3f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
)
"""What steps with a value head, or on data as they are, have besides."""
LEAST_NEEDED = (
    *("value_clip_ratio", "grad_norm", "entropy", "reward_std", "tokens_per_second", "loss"),
    *("value_loss", "kl"),
)
"""What a terminal that is too narrow for all columns goes without, the first one first."""
RECENT_STEPS = 8
SHOWN_CHARACTERS = 300
"""Of a sample completion; ``completions.jsonl`` has all of it."""


class _Told(logging.Handler):
    def __init__(self, say: Say) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Warnings go where they would go without this handler, whose presence alone keeps Python
        from writing them to stderr."""
        if record.levelno <= logging.INFO:
            self._say(record.getMessage())
        elif not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextmanager
def told(name: str, say: Say) -> Iterator[None]:
    """Show what the logger ``name`` says at INFO as what is being done."""
    logger, handler = logging.getLogger(name), _Told(say)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def warned(tell: Callable[[str], None]) -> Iterator[None]:
    """fxrl's own warnings are messages: they say themselves which line they are about."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("fxrl."):
            tell(str(message))
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def jsonable(value: Any) -> Any:
    """``value``, or ``None`` for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Reporter:
    """How a run tells people what happens: lines, in a log file, a pipe, a notebook. What is being
    done gets one where it is new, and again after ``QUIET_S`` without any. A context manager,
    around all of the run."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock, self.start = console, clock, clock()
        self.open: list[tuple[str, float]] = []  # stages, innermost last: words, since when
        self.total = self.done = 0
        self._step_began = self.start
        self._step_seconds: list[float] = []  # of this process, whatever else was done between
        self._samples: Sequence[Mapping[str, Any]] = ()
        self._sampled = False  # the first step's completions are written; the last one's at the end
        self._known: set[str] = set()
        self._written = self.start
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ticker.join()
        self.show_last()

    def _tick_on(self) -> None:
        while not self._over.wait(1.0):
            self.tick()

    def tick(self) -> None:
        """Called every second, by a thread."""
        now = self.clock()
        for words, since in self.open[-1:]:
            if now - self._written >= max(QUIET_S, (now - since) / 4):
                self.stage_line(f"{words} ({now - since:.0f} s)", now - self.start)

    @contextmanager
    def stage(self, text: str) -> Iterator[Say]:
        depth, kind, since = len(self.open), "", self.clock()

        def say(words: str) -> None:
            nonlocal kind, since
            if (new := words.partition(":")[0]) != kind:
                kind, since = new, self.clock()
            self.open[depth:] = [(words, since)]
            self.changed(kind, words)

        say(text)
        try:
            yield say
        finally:
            del self.open[depth:]

    def changed(self, kind: str, words: str) -> None:
        """Change the words for what is being done; those before the colon are its ``kind``."""
        if kind not in self._known:
            self._known.add(kind)
            self.stage_line(words, self.clock() - self.start)

    def stage_line(self, text: str, seconds: float) -> None:
        """Writes that ``text`` is being done, ``seconds`` after the start."""
        self.message(f"{seconds:6.1f} s  {text}")

    def begin(self, total: int, done: int) -> None:
        """The loop begins: ``total`` steps, ``done`` of them by a run that is resumed."""
        self.total, self.done = total, done
        self._step_began = self.clock()

    def seconds_left(self) -> float | None:
        """Estimated by the median of the last steps. The first step, which captures and compiles,
        counts only while it is the only one; before its end nothing is known."""
        if not self._step_seconds:
            return None
        each = statistics.median((self._step_seconds[1:] or self._step_seconds)[-RECENT_STEPS:])
        spent = min(each, self.clock() - self._step_began)
        return max(0.0, each * (self.total - self.done) - spent)

    def message(self, text: str) -> None:
        self._written = self.clock()
        self.console.out(text, highlight=False)

    def stopping(self, text: str) -> None:
        """A message after which the process may be ended at any moment."""
        self.message(text)

    def show(self, found: RenderableType) -> None:
        """Print a table, to stay: without colours, which a console that began on a terminal would
        write into a file too, and without the blanks that fill a terminal's lines."""
        for parts in self.console.render_lines(found, pad=False):
            self.console.out("".join(part.text for part in parts).rstrip(), highlight=False)

    def report(self, report: Report) -> None:
        """Show what ``fxrl.optimize`` did, after the first step."""
        self.show(report)

    def step(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        self._count(record, samples)
        columns = (*COLUMNS[1:], *EXAMPLE_COLUMNS)
        words = [f"{name} {_cell(record, key, form)}" for name, key, form in columns]
        shown = "  ".join(word for word in words if not word.endswith(" -"))
        left = f"{_hours(self.seconds_left())} left"
        self.message(f"step {self.done}/{self.total}  {shown}  {left}  ({time_line(record)})")
        if samples and not self._sampled:
            self._sampled = True
            Reporter.show_last(self)

    def _count(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        now = self.clock()
        self._step_seconds.append(now - self._step_began)
        self._step_began = now
        self.done, self._samples = record["step"], samples or self._samples

    def show_last(self) -> None:
        """Print what was seen last once more, to stay."""
        samples, self._samples = self._samples, ()
        if samples:
            self.show(completions_table(samples))

    def summary(self, values: Mapping[str, Any]) -> None:
        self.show_last()
        table = Table(title="summary", show_header=False)
        for name, value in values.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, Text(shown))
        self.show(table)


class PatientReporter(Reporter):
    """Only what takes longer than ``QUIET_S``: for commands whose answer is all that is wanted."""

    def changed(self, kind: str, words: str) -> None:
        """Nothing is written for new words alone."""


class JsonReporter(Reporter):
    """One JSON object per event; a step's line is its line of ``metrics.jsonl``."""

    def _line(self, event: str, values: Mapping[str, Any]) -> None:
        plain = {key: jsonable(value) for key, value in values.items()}
        super().message(json.dumps({"event": event, **plain}))

    def stage_line(self, text: str, seconds: float) -> None:
        self._line("stage", {"text": text, "elapsed_s": round(seconds, 1)})

    def message(self, text: str) -> None:
        self._line("message", {"text": text})

    def report(self, report: Report) -> None:
        for line in report.to_json().splitlines():
            self._line("remark", json.loads(line))

    def step(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        self._line("step", record)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._line("summary", values)


def broken(text: str, width: int) -> str:
    """``text`` in lines that break between words, as a terminal's own do not, and go on below where
    they began."""
    return folded(text.splitlines(), width, further=0)


class LiveReporter(Reporter):
    """A view on a terminal that is drawn anew several times a second, whatever the run does; lines
    where the terminal has been closed and the run goes on in a file."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._spinner = Spinner("dots")
        self._live = Live(
            console=console, transient=True, get_renderable=self.view, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        super().__exit__()

    @property
    def _closed(self) -> bool:
        closed = not self.console.is_terminal
        if closed and self.console.is_interactive:
            self.console.is_interactive = False  # else the view is printed beside each line
        return closed

    def tick(self) -> None:
        if self._closed:
            super().tick()

    def changed(self, kind: str, words: str) -> None:
        if self._closed:
            super().changed(kind, words)

    def message(self, text: str) -> None:
        if self._closed:
            super().message(text)
        else:
            text = broken(text, self.console.width)
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, found: RenderableType) -> None:
        if self._closed:
            super().show(found)
        else:
            self.console.print(found)

    def stopping(self, text: str) -> None:
        """Gives the terminal its cursor back: a second signal leaves no time for that."""
        super().stopping(text)
        if not self._closed:
            self.console.show_cursor(True)

    def view(self) -> Group:
        """The live view: what is being done, on top where no small window hides it, then the last
        steps."""
        views: list[Any] = []
        for words, since in self.open[-1:]:
            now = self.clock()
            times = f"  {now - since:.0f} s  ({now - self.start:.0f} s in all)"
            text = Text(words.replace("\n", " "))
            text.truncate(self.console.width - len(times) - 3, overflow="ellipsis")
            self._spinner.update(text=text + times)
            views.append(self._spinner)
        if self.total:
            views.append(self._bar())
        if self._recent:
            table = steps_table(self._recent, self.console.width)
            views += [table, Text(time_line(self._recent[-1]))]
        if self._samples:
            views.append(completions_table(self._samples))
        return Group(*views)

    def _bar(self) -> Table:
        """A bar with the step that is under way and the time when all will be done."""
        bar = Table.grid(padding=(0, 1))
        words = f"{_hours(self.clock() - self.start)} elapsed, {_hours(self.seconds_left())} left"
        done = ProgressBar(total=self.total, completed=self.done, width=24)
        bar.add_row(Text("steps done", "bold"), done, f"{self.done}/{self.total}", words)
        return bar

    def step(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        if self._closed:
            super().step(record, samples)
        else:
            self._count(record, samples)
        self._recent.append(record)

    def show_last(self) -> None:
        last = [steps_table([*self._recent], self.console.width)] if self._recent else []
        last += [completions_table(self._samples)] if self._samples else []
        self._recent.clear()
        self._samples = ()
        self._live.refresh()  # else they stand in the view below as well, which scrolls these away
        for table in last:
            self.show(table)


def reporter_on(console: Console, *, json: bool, log: type[Reporter] = Reporter) -> Reporter:
    """The reporter that suits the console; ``log`` where it is no terminal."""
    if json:
        return JsonReporter(console)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveReporter(console) if live else log(console)


def steps_table(records: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The last steps, a row each, in ``width`` columns of text.

    Columns without any value are left out, and where there is no room also ``LEAST_NEEDED``.
    """
    shown = {
        key: [name, *(_cell(record, key, form) for record in records)]
        for name, key, form in (*COLUMNS, *EXAMPLE_COLUMNS)
        if any(record.get(key) is not None for record in records)
    }
    widths = {key: 1 + max(map(len, cells)) for key, cells in shown.items()}
    for key in LEAST_NEEDED:
        if sum(widths.values()) - 1 > width:
            widths.pop(key, None)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for key in widths:
        table.add_column(shown[key][0], justify="right", no_wrap=True)
    for cells in zip(*(shown[key][1:] for key in widths), strict=True):
        table.add_row(*cells)
    return table


def time_line(record: Mapping[str, Any]) -> str:
    """The parts of a step's time, the largest first; parts below one percent are left out."""
    seconds = {phase: record.get(f"time/{phase}") or 0.0 for phase in PHASES}
    total = sum(seconds.values())
    shown = sorted((p for p in PHASES if seconds[p] > total / 100), key=lambda p: -seconds[p])
    return ", ".join(f"{phase} {seconds[phase]:.2f} s" for phase in shown)


def completions_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Sample completions with reward and advantage, each below its prompt."""
    table = Table(title="sample completions", title_justify="left", box=None, pad_edge=False)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    table.add_column("prompt, completion", overflow="fold")
    for sample in samples:
        reward = "-" if sample["reward"] is None else f"{sample['reward']:.2f}"
        prompt = Text(repr(sample["question"])[1:-1], "dim", no_wrap=True, overflow="ellipsis")
        completion = repr(sample["completion"])[1:-1]
        if (more := len(completion) - SHOWN_CHARACTERS) > 0:
            completion = f"{completion[:SHOWN_CHARACTERS]}... ({more} more characters)"
        table.add_row("", "", prompt)
        advantage = "-" if sample["advantage"] is None else f"{sample['advantage']:+.2f}"
        table.add_row(reward, advantage, Text(completion))
    return table


def _hours(seconds: float | None) -> str:
    """``"1:02:03"``; dashes where nothing is known."""
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


def _cell(record: Mapping[str, Any], key: str, form: str) -> str:
    """A number in a column's form; one that would be nothing in it, by its first digit."""
    value = record.get(key)
    if value is None:
        return "-"
    shown = form.format(value)
    return f"{value:.1g}" if value and not shown.strip("-0.") else shown
