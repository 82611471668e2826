"""What is left of a loop that a graph ends within, as code that goes on behind the break runs it.

    for layer in layers:                         for layer in Rest(layers, 1):
        x = layer(x)                 becomes         x = layer(x)
        print(x)                                     print(x)

Python's own iterators cannot be traced where another graph is handed them. These can, and are as
lazy: what is written meanwhile into a list that is looped over is read, and two loops that share
an iterator still do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import length_hint
from typing import Any


class _Rest(Iterator[Any]):
    """Dynamo asks how many are left; a loop may ask whether there is an iterator."""

    def __bool__(self) -> bool:
        return True


class Rest(_Rest):
    """Of a list or a dictionary, from an index on; of a dictionary by the name of its view."""

    def __init__(self, over: Collection[Any], index: int, view: str = "") -> None:
        self.over, self.index, self.view = over, index, view

    def __next__(self) -> Any:
        left = list(getattr(self.over, self.view)() if self.view else self.over)[self.index :]
        if not left:
            self.over, self.view = [], ""  # once at its end, it stays there
            raise StopIteration
        self.index += 1
        return left[0]

    def __len__(self) -> int:
        return max(len(self.over) - self.index, 0)


class Counted(_Rest):
    """Of ``enumerate``."""

    def __init__(self, iterator: Iterator[Any], count: int) -> None:
        self.iterator, self.count = iterator, count

    def __next__(self) -> tuple[int, Any]:
        found = next(self.iterator)
        self.count += 1
        return self.count - 1, found

    def __len__(self) -> int:
        return length_hint(self.iterator)


class Zipped(_Rest):
    """Of ``zip``."""

    def __init__(self, iterators: tuple[Iterator[Any], ...], strict: bool) -> None:
        self.iterators, self.strict = iterators, strict

    def __next__(self) -> tuple[Any, ...]:
        if not self.iterators:
            raise StopIteration
        found: list[Any] = []
        for iterator in self.iterators:
            try:
                found.append(next(iterator))
            except StopIteration:
                if self.strict and (found or self._any_left()):
                    raise ValueError("zip() arguments are not of one length") from None
                raise
        return tuple(found)

    def _any_left(self) -> bool:
        for iterator in self.iterators[1:]:
            try:
                next(iterator)
            except StopIteration:
                continue
            return True
        return False

    def __len__(self) -> int:
        return min(map(length_hint, self.iterators), default=0)
