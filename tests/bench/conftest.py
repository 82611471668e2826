"""Benchmarks in a process that holds what other tests left."""

import functools
import gc

import pytest


@pytest.fixture(autouse=True)
def _what_a_row_leaves_is_young(monkeypatch):
    """Looking at all that is old takes a second a row."""
    monkeypatch.setattr(gc, "collect", functools.partial(gc.collect, 1))
