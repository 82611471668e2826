"""Which misses are open: one of a site's passes, and all that a capture says."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from fxrl.capture.breaks import break_remarks
from fxrl.ir.capture_record import GraphBreak
from fxrl.ir.on_miss import Judge, open_misses
from fxrl.ir.remark import Remark, RemarkKind, Report


def test_the_last_pass_of_a_site_speaks_for_it():
    first, last = (Remark(RemarkKind.MISSED, name, "0:mm") for name in ("fuse", "chunk"))
    assert open_misses(Report((first, last))) == (last,)
    applied = Remark(RemarkKind.APPLIED, "chunk", "0:mm")
    assert not open_misses(Report((first, applied)))


def test_every_break_of_a_graph_is_told():
    breaks = [GraphBreak("one", "a.py:1"), GraphBreak("two", "a.py:2")]
    assert len(open_misses(break_remarks(breaks, "0:graph"))) == 2


def test_a_warning_stands_at_the_users_line_and_comes_once_a_step():
    remarks = [Remark(RemarkKind.MISSED, "chunk", f"0:mm#{n}", f"my_loss.py:{n}") for n in (3, 5)]
    report = Report((*remarks, Remark(RemarkKind.MISSED, "capture", "1:graph")))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        judge = Judge("warn")
        for _ in range(2):  # as when another batch is captured
            judge(report)
        Judge("warn")(report)  # another step has the same
    places = [(one.filename, one.lineno) for one in told]
    assert places == [("my_loss.py", 3), ("my_loss.py", 5), ("fxrl", 0)] * 2
    assert [str(one.message) for one in told][:2] == list(map(str, remarks))


def test_what_ends_in_an_error_warns_of_nothing_else():
    report = Report((Remark(RemarkKind.MISSED, "chunk", "0:mm"),))
    judge = Judge("warn")

    def lacking():
        with judge.after():
            judge(report)
            raise KeyError

    def in_another_thread():
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
            pool.submit(lacking).result()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyError):
            lacking()
        assert not told
        with judge.after():
            in_another_thread()
            judge(report)
            in_another_thread()
            assert not told
    assert len(told) == 1
