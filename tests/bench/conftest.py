"""Benchmarks in a process that holds what other tests left."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _what_a_row_leaves_is_young(monkeypatch):
    """Looking at all that is old takes a second a row."""
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda generation=2: collect(min(generation, 1)))
