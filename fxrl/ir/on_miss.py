"""What to do about rewrites that did not happen: ``Config.on_miss``."""

from __future__ import annotations

import warnings
from typing import Any

from fxrl.errors import MissedRewriteError
from fxrl.ir.remark import Remark, RemarkKind, Report

_NO_PASSES = ("capture", "plan", "kernels")
_warned: dict[Any, Any] = {}  # what a module's ``__warningregistry__`` is: none is told twice


class MissedRewriteWarning(UserWarning):
    """A rewrite did not happen; the text says where, why and what to do."""


def open_misses(report: Report) -> tuple[Remark, ...]:
    """Missed remarks of sites that no other pass rewrote.

    Of one site it is the last pass that declined which knows the general reason. What is no pass
    (a capture, its plan, its kernels) has one site for all that it says.
    """
    rewritten = {remark.site for remark in report.of_kind(RemarkKind.APPLIED)}
    found: dict[tuple[str, ...], Remark] = {}
    for remark in report.of_kind(RemarkKind.MISSED):
        if remark.site not in rewritten:
            whole = remark.pass_name in _NO_PASSES
            found[(remark.site, remark.reason) if whole else (remark.site,)] = remark
    return tuple(found.values())


def judge_misses(report: Report, on_miss: str) -> None:
    """Warn or raise about sites that stay as they are; a warning stands at the user's line."""
    misses = open_misses(report)
    if not misses or on_miss == "ignore":
        return
    if on_miss == "error":
        raise MissedRewriteError("; ".join(map(str, misses)))
    for miss in misses:
        file, _, line = miss.source.rpartition(":")
        place = (file, int(line)) if file else ("fxrl", 0)
        warnings.warn_explicit(str(miss), MissedRewriteWarning, *place, registry=_warned)
