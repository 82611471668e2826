"""What to do about rewrites that did not happen: ``Config.on_miss``."""

from __future__ import annotations

import warnings

from fxrl.errors import MissedRewriteError
from fxrl.ir.remark import Remark, RemarkKind, Report


class MissedRewriteWarning(UserWarning):
    """A rewrite did not happen; the text says where, why and what to do."""


def open_misses(report: Report) -> tuple[Remark, ...]:
    """Missed remarks of sites that no other pass rewrote."""
    rewritten = {remark.site for remark in report.of_kind(RemarkKind.APPLIED)}
    found: dict[str, Remark] = {}
    for remark in report.of_kind(RemarkKind.MISSED):
        if remark.site not in rewritten:
            found[remark.site] = remark  # the last pass that declined knows the general reason
    return tuple(found.values())


def judge_misses(report: Report, on_miss: str) -> None:
    """Warn or raise about sites that stay as they are.

    Raises:
        MissedRewriteError: ``on_miss="error"`` and a site was missed.
    """
    misses = open_misses(report)
    if not misses or on_miss == "ignore":
        return
    text = "; ".join(map(str, misses))
    if on_miss == "error":
        raise MissedRewriteError(text)
    warnings.warn(text, MissedRewriteWarning, stacklevel=2)
