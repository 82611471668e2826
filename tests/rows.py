"""Rows of a table of which each commit's run takes those that differ in kind."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(every: Iterable[Any], seldom: Collection[Any]) -> list[Any]:
    """What ``parametrize`` takes: all rows; those in ``seldom`` only run with ``-m slow``.

    A row is seldom run if another test always runs each line and branch of fxrl that it runs, and
    shows its kind: what is refused and why, what is rewritten, who is told.
    """
    every = list(every)
    unknown = [row for row in seldom if row not in every]
    assert not unknown, f"no such rows: {unknown}"
    return [pytest.param(row, marks=pytest.mark.slow) if row in seldom else row for row in every]
