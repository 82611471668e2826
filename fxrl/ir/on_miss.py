"""What to do about rewrites that did not happen: ``Config.on_miss``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import local

from fxrl.errors import MissedRewriteError
from fxrl.ir.plan import Keep, Plan
from fxrl.ir.remark import Remark, RemarkKind, Report

_NO_PASSES = ("capture", "plan", "kernels")


class MissedRewriteWarning(UserWarning):
    """A rewrite did not happen; the text says where, why and what to do."""


def open_misses(report: Report) -> tuple[Remark, ...]:
    """Missed remarks of sites that no other pass rewrote.

    Of one site it is the last pass that declined which knows the general reason. What is no pass
    (a capture, its plan, its kernels) has one site for all that it says.
    """
    found: dict[tuple[str, ...], Remark] = {}
    for remark in report.settled().of_kind(RemarkKind.MISSED):
        whole = remark.pass_name in _NO_PASSES
        found[(remark.site, remark.reason) if whole else (remark.site,)] = remark
    return tuple(found.values())


def illegal_misses(report: Report, plan: Plan) -> tuple[Remark, ...]:
    """The open misses of sites that no pass could rewrite, without those that a pass could and left
    as they are, such as below ``min_saved_bytes``."""
    misses = open_misses(report)
    return tuple(miss for miss in misses if not isinstance(plan.choices.get(miss.site), Keep))


class _Block(local):
    """For each thread, what it will warn of when its block ends; None outside of a block."""

    waiting: list[Remark] | None = None


class Judge:
    """Warns or raises about sites that stay as they are, for one step, which tells of each once."""

    def __init__(self, on_miss: str) -> None:
        self._on_miss = on_miss
        self._told: set[Remark] = set()
        self._block = _Block()

    @contextmanager
    def after(self) -> Iterator[None]:
        """Warn only when the block has ended, and not if it raises: its captures may be of a broken
        batch, such as one that lacks a key."""
        waiting: list[Remark] = []
        self._block.waiting = waiting
        try:
            yield
        finally:
            self._block.waiting = None
        self._warn(waiting)

    def __call__(self, report: Report) -> None:
        """Judge a report; a warning stands at the user's line."""
        misses = open_misses(report)
        if not misses or self._on_miss == "ignore":
            return
        if self._on_miss == "error":
            raise MissedRewriteError("; ".join(map(str, misses)))
        if self._block.waiting is None:
            self._warn(misses)
        else:
            self._block.waiting += misses

    def _warn(self, misses: Iterable[Remark]) -> None:
        for miss in misses:
            if miss in self._told:
                continue
            self._told.add(miss)
            file, _, line = miss.source.rpartition(":")
            place = (file, int(line)) if file else ("fxrl", 0)
            warnings.warn_explicit(str(miss), MissedRewriteWarning, *place)
