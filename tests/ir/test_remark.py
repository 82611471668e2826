"""Remarks and reports: the table for people, the lines for tools."""

import dataclasses
import io
import json

import pytest
from expecttest import assert_expected_inline
from rich.console import Console

from fxrl.inspect.compare import VerifyReport
from fxrl.ir import table
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Remark, RemarkKind, Report, format_bytes

REPORT = Report.of(
    [
        Remark(
            RemarkKind.APPLIED,
            "fuse-linear-logprob",
            "gather_1",
            "train/loss.py:14",
            "no logits f32[s0, s1, 151936]: the head runs inside the log-probability",
            saved_bytes=28 * 2**30,
        ),
        Remark(
            RemarkKind.MISSED,
            "chunk-vocab-region",
            "mm_14",
            "train/loss.py:21",
            "%softmax is returned by the loss function",
            "return only what the loop reads",
            3 * 2**20,
        ),
        Remark(RemarkKind.ANALYSIS, "chunk-vocab-region", "mm_14", reason="2 rows share a tile"),
    ]
)


def test_table():
    assert_expected_inline(
        REPORT.table(width=100),
        """\
pass                  site       source             verdict        saved   reason and cure
----------------------------------------------------------------------------------------------------
fuse-linear-logprob   gather_1   train/loss.py:14   applied    28.00 GiB   no logits f32[s0, s1,
                                                                           151936]: the head runs
                                                                           inside the
                                                                           log-probability
chunk-vocab-region    mm_14      train/loss.py:21   missed       (3 MiB)   %softmax is returned by
                                                                           the loss function
                                                                           cure: return only what
                                                                           the loop reads
chunk-vocab-region    mm_14                         analysis               2 rows share a tile

predicted to save 28.00 GiB at the peak
3 remarks: 1 applied, 1 missed, 1 analysis""",
    )


def test_what_is_said_in_the_same_words_is_told_once():
    small = {"reason": "below min_saved_bytes=32 MiB", "source": "a.py:7"}
    said = [
        *(Remark("missed", name, "0:mm", saved_bytes=7, **small) for name in ("fuse", "chunk")),
        *(Remark("analysis", "noops", f"0:view_{i}", reason="left out") for i in range(3)),
        Remark("missed", "fuse", "1:mm", **small),
    ]
    assert_expected_inline(
        Report.of(said).table(width=100),
        """\
pass    site                   source   verdict    saved   reason and cure
---------------------------------------------------------------------------------------
fuse,   0:mm                   a.py:7   missed     (7 B)   below min_saved_bytes=32 MiB
chunk
noops   0:view_0 to 0:view_2            analysis           left out
fuse    1:mm                   a.py:7   missed             below min_saved_bytes=32 MiB

predicted to save 0 B at the peak
6 remarks in 3 entries: 0 applied, 2 missed, 1 analysis""",
    )


def test_in_few_columns_every_part_has_lines_of_its_own():
    assert_expected_inline(
        REPORT.table(width=72),
        """\
applied fuse-linear-logprob, saves 28.00 GiB
  gather_1
  train/loss.py:14
  no logits f32[s0, s1, 151936]: the head runs inside the
  log-probability
missed chunk-vocab-region, would save 3 MiB
  mm_14
  train/loss.py:21
  %softmax is returned by the loss function
  cure: return only what the loop reads
analysis chunk-vocab-region
  mm_14
  2 rows share a tile

predicted to save 28.00 GiB at the peak
3 remarks: 1 applied, 1 missed, 1 analysis""",
    )


def test_empty():
    assert "call the step on a batch first" in str(Report())
    assert Report().to_json() == ""


def test_str_is_plain_whatever_the_environment(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert "\x1b" not in str(REPORT)
    assert str(REPORT) == REPORT.table(table.terminal_width())


def test_str_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setattr(table, "terminal_width", lambda: 77)
    assert str(REPORT) == REPORT.table(77) != REPORT.table(110)


def test_rich_shows_colour():
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="standard", width=110).print(REPORT)
    assert "\x1b[32mapplied" in file.getvalue()
    assert "\x1b[33mmissed" in file.getvalue()


def test_a_plain_string_is_a_kind():
    report = Report.of([Remark("applied", "p", "s", saved_bytes=5)])
    assert report.saved_bytes == 5
    assert "1 applied, 0 missed" in str(report)


def test_only_what_is_applied_counts_as_saved():
    assert REPORT.saved_bytes == 28 * 2**30
    assert (REPORT + REPORT).saved_bytes == 2 * REPORT.saved_bytes


def test_json_lines_round_trip():
    lines = [json.loads(line) for line in REPORT.to_json().splitlines()]
    assert [Remark(**line) for line in lines] == list(REPORT.remarks)
    assert lines[1]["kind"] == "missed"


def test_remark_is_one_line_and_frozen():
    missed = REPORT.remarks[1]
    assert str(missed) == (
        "missed: chunk-vocab-region @ mm_14 [train/loss.py:21]: %softmax is returned by the loss "
        "function; return only what the loop reads (saves 3 MiB)"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        missed.reason = "other"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1536, "1.5 KiB"), (32 * 2**20, "32 MiB"), (75 * 2**30, "75.00 GiB")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_a_miss_that_another_pass_takes_is_shown_as_a_fact():
    taken = Remark(RemarkKind.MISSED, "fuse", "0:mm", reason="heads meet")
    report = Report((taken, Remark(RemarkKind.APPLIED, "chunk", "0:mm")))
    assert "0 missed, 1 analysis" in str(report)
    assert report.of_kind("missed") == (taken,)


@pytest.mark.parametrize("shown", [REPORT, Plan(), VerifyReport(ok=True, rows=())])
def test_a_notebook_shows_what_print_does(shown, capsys):
    """By IPython's protocol; a dataclass's ``repr`` would be one long line."""
    shown._ipython_display_()
    assert capsys.readouterr().out == f"{shown}\n"
