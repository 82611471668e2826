"""Progress views, metrics files and the curve."""

import io
import json
import logging
import math
import re
import subprocess
import sys
import time
import warnings

import pytest
from rich.console import Console

from fxrl.cli import main
from fxrl.engines.engine import Drawing
from fxrl.ir.on_miss import MissedRewriteWarning
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.rl.report import progress
from fxrl.rl.report.files import JsonLines, read_lines
from fxrl.rl.report.progress import JsonReporter, Reporter, reporter_on, told, warned

RECORDS = [
    {"step": i, "reward": i / 9, "reward_std": 0.1, "kl": 0.01 * i, "loss": None}
    | {"completions/mean_length": 10.0 - i, "tokens_per_second": 7.0, "step_time": 0.5}
    | {"time/generate": 0.3, "time/train": 0.1996, "time/wake": 0.0004}
    for i in range(1, 10)
]
SAMPLE = {"question": "[bold]1 + 1?\n", "completion": "2\x07[/x]", "reward": 1.0, "advantage": -0.5}
REPORT = Report(
    (
        Remark(RemarkKind.APPLIED, "fuse-linear-logprob", "mm_1", "a.py:3", "fused", "", 2**20),
        Remark(RemarkKind.MISSED, "chunk-vocab-region", "mm_2", "", "escapes", "do not return it"),
    )
)


def shown(terminal):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=150)
    with reporter_on(console, json=False) as reporter:
        reporter.begin(9, 0)
        reporter.report(REPORT)
        for record in RECORDS:
            reporter.step(record, [SAMPLE])
        reporter.message("a [word]")
        reporter.summary({"reward": 0.25, "model": "out/final"})
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_view_has_report_steps_samples_and_summary(terminal):
    text = shown(terminal)
    for words in ("fuse-linear-logprob", "a.py:3", "1 MiB", "escapes", "cure: do not return it"):
        assert words in text
    assert "predicted to save 1 MiB at the peak" in text
    assert "1 applied, 1 missed" in text
    assert "a [word]" in text
    assert r"[bold]1 + 1?\n" in text
    assert r"2\x07[/x]" in text
    assert "0.25" in text


def test_the_end_stays_on_the_screen():
    """A view that is drawn once more below the summary, and erased, would leave nothing of it in a
    small window."""
    stream = io.StringIO()
    with reporter_on(Console(file=stream, force_terminal=True, width=80), json=False) as reporter:
        reporter.step(RECORDS[0], [SAMPLE])
        while "sample completions" not in stream.getvalue():  # the view is drawn by a thread
            time.sleep(0.05)
        reporter.summary({"reward": 0.25})
    _, _, behind = stream.getvalue().rpartition("summary")
    assert "sample completions" not in behind
    assert "reward" in behind


def test_a_line_that_is_broken_goes_on_below_where_it_began():
    text = progress.broken("2 mistakes\n  model.id: no such kind\n  optim: none", 16)
    assert text == "2 mistakes\n  model.id: no\n  such kind\n  optim: none"


def test_a_log_file_gets_one_line_per_step():
    lines = [line for line in shown(False).splitlines() if line.startswith("step ")]
    assert len(lines) == 9
    assert "reward 0.111" in lines[0]
    assert "KL 0.0100" in lines[0]
    assert "loss" not in lines[0]
    assert lines[0].endswith("(generate 0.30 s, train 0.20 s)"), "the largest first, no crumbs"


def test_eleven_columns_fit_into_eighty():
    """``held-out`` aside, every number of a step can be read on a small terminal."""
    typical = (120, 0.3125, 0.31, -0.0123, 0.0123, 2.112, 123.4, 1.122, 1234, 0.0123, 143.1)
    record = {key: number for (_, key, _), number in zip(progress.COLUMNS, typical, strict=False)}
    console = Console(file=io.StringIO(), width=80)
    console.print(progress.steps_table([record], 80))
    header, values = console.file.getvalue().splitlines()
    assert header.split() == [name for name, _, _ in progress.COLUMNS[:-1]]
    assert values.split() == [form.format(record[key]) for _, key, form in progress.COLUMNS[:-1]]


def test_a_small_number_is_shown_by_its_first_digit():
    console = Console(file=io.StringIO(), width=80)
    record = {"step": 1, "tokens_per_second": 0.37, "kl": 0.00002, "reward": 0.0}
    console.print(progress.steps_table([record], 80))
    assert console.file.getvalue().splitlines()[1].split() == ["1", "0.000", "2e-05", "0.4"]


def test_with_held_out_accuracy_the_least_needed_columns_go():
    """No number is cut: a column is there with all its digits, or not at all."""
    typical = (120, 0.3125, 0.31, -0.0123, 0.0123, 2.112, 123.4, 1.122, 1234, 0.0123, 143.1, 0.75)
    record = {key: number for (_, key, _), number in zip(progress.COLUMNS, typical, strict=True)}
    for width in (80, 60, 40):
        console = Console(file=io.StringIO(), width=width)
        console.print(progress.steps_table([record], width))
        header, values = console.file.getvalue().splitlines()
        assert "…" not in values
        forms = {name: (key, form) for name, key, form in progress.COLUMNS}
        shown = {name: form.format(record[key]) for name, (key, form) in forms.items()}
        assert values.split() == [shown[name] for name in header.split()]
        assert {"step", "reward", "held-out", "s"} <= {*header.split()}


def test_a_long_completion_is_cut_and_says_so():
    console = Console(file=io.StringIO(), width=80)
    console.print(progress.completions_table([SAMPLE | {"completion": "ab " * 500}]))
    text = console.file.getvalue()
    assert "(1200 more characters)" in " ".join(text.split())
    assert len(text.splitlines()) < 12
    assert max(map(len, text.splitlines())) <= 80


def test_json_lines_are_json():
    stream = io.StringIO()
    with JsonReporter(Console(file=stream, width=20)) as reporter:
        reporter.report(REPORT)
        reporter.step({"step": 1, "loss": math.nan, "long": "x" * 99}, [SAMPLE])
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["remark", "remark", "step"]
    assert events[2]["loss"] is None


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


def test_a_log_says_what_is_being_done_once_and_again_when_it_is_quiet():
    stream, clock = io.StringIO(), Clock()
    log = Reporter(Console(file=stream, width=80), clock)
    with log.stage("loading: a [model]") as say:
        clock.now += 4
        say("converting: 1 of 9 [parts]")
        for _ in range(12):
            clock.now += 1
            log.tick()
        say("converting: 8 of 9 [parts]")  # new numbers are no news
    for _ in range(2):
        clock.now += 4
        with log.stage("training: 5 tokens"), log.stage("compiling: 2 bodies"):
            clock.now += 5
            log.tick()
        log.tick()
    clock.now += 60
    log.tick()  # nothing is being done
    with log.stage("training: 6 tokens"):
        for _ in range(100):
            clock.now += 1
            log.tick()
    assert [line.split(" s  ") for line in stream.getvalue().splitlines()] == [
        ["   0.0", "loading: a [model]"],
        ["   4.0", "converting: 1 of 9 [parts]"],
        ["  14.0", "converting: 1 of 9 [parts] (10 s)"],
        ["  20.0", "training: 5 tokens"],
        ["  20.0", "compiling: 2 bodies"],
        ["  34.0", "compiling: 2 bodies (5 s)"],  # nothing was written for 14 s
        *(
            [f"{94 + s:6.1f}", f"training: 6 tokens ({s} s)"]
            for s in (1, 11, 21, 31, 42, 56, 75, 100)
        ),
    ]


def test_json_has_the_stages_too():
    stream, clock = io.StringIO(), Clock()
    reporter = JsonReporter(Console(file=stream, width=20), clock)
    with reporter.stage("generating: 8 completions"):
        clock.now += 12.34
        reporter.tick()
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"event": "stage", "text": "generating: 8 completions", "elapsed_s": 0.0},
        {"event": "stage", "text": "generating: 8 completions (12 s)", "elapsed_s": 12.3},
    ]


def test_a_terminal_shows_the_innermost_stage_and_its_seconds():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    reporter = reporter_on(console, json=False)
    clock = reporter.clock = Clock()
    reporter.start = clock.now

    def seen():
        with console.capture() as capture:
            console.print(reporter.view())
        return capture.get()

    with reporter.stage("training"):
        clock.now += 3
        with reporter.stage("compiling: 2 [bodies]") as say:
            clock.now += 4
            assert "compiling: 2 [bodies]  4 s  (7 s in all)" in seen()
            say("compiling: 1 of 2")
            assert "compiling: 1 of 2  4 s" in seen()
        assert "training  7 s" in seen()
    with reporter.stage(f"converting to {'/a/long/path' * 20}"):
        [line] = seen().strip().splitlines()
        assert line.endswith("…  0 s  (7 s in all)"), "words give way, seconds do not"
    assert seen().strip() == ""


def test_a_terminal_breaks_messages_between_words():
    stream = io.StringIO()
    reporter = progress.LiveReporter(Console(file=stream, force_terminal=True, width=40))
    path = "/a/long/path" * 5
    reporter.message("the run is in bfloat16, which this CPU is fast at")
    reporter.message(f"the model is in {path}")
    lines = stream.getvalue().splitlines()
    assert [line.rstrip() for line in lines] == [
        "the run is in bfloat16, which this CPU",
        "is fast at",
        "the model is in",
        path,
    ]


def test_a_message_leaves_the_view_as_it_is():
    stream = io.StringIO()
    with progress.LiveReporter(Console(file=stream, force_terminal=True, width=80)) as reporter:
        reporter.begin(9, 0)
        reporter.show_last()  # draws the view
        before = stream.tell()
        reporter.message("a [word]")
        assert "\x1b[1msteps done" in stream.getvalue()[before:]


def test_what_is_left_is_known_from_the_second_step_on():
    """However long a step takes; the first one captures, so it counts only while it is alone."""
    for reporter in (Reporter, progress.LiveReporter):
        stream, clock = io.StringIO(), Clock()
        told = reporter(Console(file=stream, force_terminal=True, width=80), clock)
        clock.now += 60
        told.begin(12, 2)
        assert told.seconds_left() is None
        clock.now += 400
        told.step({"step": 3, "step_time": 400.0}, [])
        assert told.seconds_left() == 9 * 400
        for step, seconds in ((4, 90), (5, 110), (6, 100)):
            clock.now += seconds
            told.step({"step": step, "step_time": 1.0}, [])
        assert told.seconds_left() == 6 * 100
        clock.now += 30
        assert told.seconds_left() == 6 * 100 - 30
        clock.now += 900
        assert told.seconds_left() == 5 * 100, "the step under way is no news for the others"
        if reporter is Reporter:
            assert "0:10:00 left" in stream.getvalue()
        else:
            with told.console.capture() as capture:
                told.console.print(told.view())
            assert "6/12" in capture.get()
            assert "0:28:10 elapsed, 0:08:20 left" in capture.get()


def test_a_thread_writes_while_the_run_is_busy(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with Reporter(Console(file=stream, width=80)) as log, log.stage("capturing"):
        for _ in range(1000):
            if "capturing (" in stream.getvalue():
                break
            time.sleep(0.01)
    assert "capturing (" in stream.getvalue()


def test_the_first_words_do_not_wait_for_torch(tmp_path):
    """Of the command itself: when it begins to speak, nothing heavy is imported."""
    (tmp_path / "a.toml").touch()
    code = (
        "import sys\nfrom fxrl.cli import main\nfrom fxrl.rl.report.progress import Reporter\n"
        "def first(self, kind, words):\n"
        "    print(words, *{'torch', 'numpy', 'transformers'} & {*sys.modules}, sep='; ')\n"
        "    sys.exit(0)\n"
        f"Reporter.changed = first\nmain(['train', {str(tmp_path / 'a.toml')!r}])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "importing PyTorch\n"


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path, 0)
    for step in (1, 2, 3):
        lines.write({"step": step, "x": 0.1 * step, "bad": math.inf})
    before = path.read_text()  # on disk before it is closed
    lines.close()
    assert len(before.splitlines()) == 3
    path.write_text(before + '{"step": 4, "x')
    lines = JsonLines(path, 2)
    lines.write({"step": 3})
    lines.close()
    assert path.read_text() == "".join(before.splitlines(True)[:2]) + '{"step": 3}\n'
    assert read_lines(path)[0] == {"step": 1, "x": 0.1, "bad": None}
    JsonLines(path, 0).close()
    assert path.read_text() == ""


def test_own_warnings_are_messages_without_lines_of_fxrls():
    said = []
    with warnings.catch_warnings(record=True) as others, warned(said.append):
        warnings.simplefilter("always")
        warnings.warn("missed: a head", MissedRewriteWarning, stacklevel=1)
        warnings.warn("of a library", UserWarning, stacklevel=1)
    assert said == ["missed: a head"]
    assert [str(one.message) for one in others] == ["of a library"]


def test_a_warning_is_not_lost_in_what_is_being_done(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    said = []
    with told("fxrl", said.append):
        logging.getLogger("fxrl.models.load").warning("weights of 4 bits")
        logging.getLogger("fxrl.models.load").info("converting")
    assert said == ["converting"]
    assert "weights of 4 bits" in capsys.readouterr().err


def test_a_run_says_what_it_does_from_the_import_to_the_end(config_file, capsys):
    """Each of it in a line, by micro-batch where there are several; a log has the same words."""
    words = ["run_dir=out", "steps=2", "micro_batch_tokens=64", "save_every=1"]
    assert main(["train", str(config_file), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.split(" s  ")[1] for line in lines if re.match(r" *[0-9.]+ s  ", line)]
    kinds = [text.partition(":")[0] for text in told]
    assert kinds == [
        "importing PyTorch", "reading the configuration and the data",
        "loading the tokenizer", "reading the data", "putting the run together", "loading tiny",
        "planning", "generating", "judging", "scoring", "training", "saving", "writing run.html",
    ]  # fmt: skip
    training = told[kinds.index("training")]
    assert re.fullmatch(r"training: \d+ tokens in micro-batches: [2-9]", training)
    assert [line for line in lines if line.startswith("step 1/2") and " left " in line]


def test_micro_batches_are_told_one_by_one(config_file, monkeypatch):
    said = []
    monkeypatch.setattr(Reporter, "changed", lambda self, kind, words: said.append(words))
    words = ["run_dir=out", "steps=1", "micro_batch_tokens=64", "eval.size=0"]
    assert main(["train", str(config_file), *words]) == 0
    for what in ("scoring", "training"):
        each = [re.fullmatch(what + r": micro-batch (\d) of (\d)", text) for text in said]
        numbers = [(int(m[1]), int(m[2])) for m in each if m]
        count = numbers[0][1]
        assert count > 1
        assert numbers == [(n, count) for n in range(1, count + 1)]


def test_tokens_and_completions_are_told_while_they_are_drawn(caplog):
    """At most once a second, however many there are."""
    clock = Clock()
    drawing = Drawing(8, clock)
    with caplog.at_level(logging.INFO):
        for ended in (0, 0, 0, 1, 2):
            clock.now += 0.5
            drawing.add(50, ended)
    assert caplog.messages == [
        "generating: 0 of 8 completions, 100 tokens/s",
        "generating: 1 of 8 completions, 100 tokens/s",
    ]


def test_what_compiles_is_told_while_a_stage_lasts():
    """The library says it to its log; a run shows it."""
    stream, logger = io.StringIO(), logging.getLogger("fxrl.compile.backend")
    with reporter_on(Console(file=stream, width=150), json=False) as reporter:
        with reporter.stage("training: 9 tokens") as say, told("fxrl.compile", say):
            logger.info("compiling the step: body %d of %d", 1, 2)
            assert reporter.open[-1][0] == "compiling the step: body 1 of 2"
        logger.info("unheard")
    assert "compiling the step: body 1 of 2" in stream.getvalue()
    assert "unheard" not in stream.getvalue()
