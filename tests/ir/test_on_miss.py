"""Which misses are open: one of a site's passes, and all that a capture says."""

from fxrl.capture.breaks import break_remarks
from fxrl.ir.capture_record import GraphBreak
from fxrl.ir.on_miss import open_misses
from fxrl.ir.remark import Remark, RemarkKind, Report


def test_the_last_pass_of_a_site_speaks_for_it():
    first, last = (Remark(RemarkKind.MISSED, name, "0:mm") for name in ("fuse", "chunk"))
    assert open_misses(Report((first, last))) == (last,)
    applied = Remark(RemarkKind.APPLIED, "chunk", "0:mm")
    assert not open_misses(Report((first, applied)))


def test_every_break_of_a_graph_is_told():
    breaks = [GraphBreak("one", "a.py:1"), GraphBreak("two", "a.py:2")]
    assert len(open_misses(break_remarks(breaks, "0:graph"))) == 2
