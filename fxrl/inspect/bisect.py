"""Which rewrites make a step wrong: search over sets of sites that are left on.

Delta debugging (Zeller and Hildebrandt, IEEE Trans. Softw. Eng. 28(2), 2002): one wrong site among
``n`` costs about ``2 log2 n`` trials; sites that are wrong only together are found as a group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
MAX_TRIALS = 64  # each compiles the step anew


class _TrialsSpent(Exception):
    """No trial is left; the search keeps what it has."""


class _Trials(Generic[S]):
    """``fails``, remembered and counted."""

    def __init__(self, fails: Callable[[frozenset[S]], bool], limit: int) -> None:
        self._fails, self._left = fails, limit
        self._known: dict[frozenset[S], bool] = {}

    def __call__(self, enabled: Sequence[S]) -> bool:
        key = frozenset(enabled)
        if key not in self._known:
            if self._left <= 0:
                raise _TrialsSpent
            self._left -= 1
            self._known[key] = self._fails(key)
        return self._known[key]


def find_blame(
    sites: Sequence[S],
    fails: Callable[[frozenset[S]], bool],
    *,
    max_trials: int = MAX_TRIALS,
) -> tuple[tuple[S, ...], str]:
    """Sites without which the step is right, in their order, and a note where that is not all.

    Args:
        sites: all sites that were rewritten.
        fails: whether the step is wrong when just these sites are rewritten.
        max_trials: upper bound of calls to ``fails``.
    """
    trials: _Trials[S] = _Trials(fails, max_trials)
    blamed: list[S] = []
    suspects = list(dict.fromkeys(sites))
    try:
        if trials([]):
            return (), "the step is wrong with every rewrite left out: the capture is to blame"
        while trials(suspects):
            # Narrowed down in place, so that a stop leaves what the search has reached.
            group = list(suspects)
            try:
                _minimal(group, trials)
            except _TrialsSpent:
                blamed += group if len(group) < len(suspects) else []
                raise
            blamed += group
            suspects = [site for site in suspects if site not in blamed]
    except _TrialsSpent:
        return _ordered(sites, blamed), f"the search stopped after {max_trials} trials"
    if not blamed:
        return (), "the step is right when it is built anew: the failure does not repeat"
    return _ordered(sites, blamed), ""


def _minimal(group: list[S], trials: _Trials[S]) -> None:
    """Shrink a failing ``group`` in place until no part of it can be left out."""
    parts = 2
    while len(group) > 1:
        chunks = _split(group, parts)
        rests = [[s for s in group if s not in chunk] for chunk in chunks] if parts > 2 else []
        if smaller := next(filter(trials, chunks), None):
            parts = 2
        elif smaller := next(filter(trials, rests), None):
            parts = max(parts - 1, 2)
        elif parts >= len(group):
            return
        else:
            parts = min(2 * parts, len(group))
            continue
        group[:] = smaller


def _split(group: Sequence[S], parts: int) -> list[list[S]]:
    bounds = [len(group) * i // parts for i in range(parts + 1)]
    return [list(group[a:b]) for a, b in pairwise(bounds)]


def _ordered(sites: Sequence[S], chosen: Sequence[S]) -> tuple[S, ...]:
    return tuple(site for site in dict.fromkeys(sites) if site in chosen)
