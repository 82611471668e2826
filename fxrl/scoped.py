"""Changes to what is somebody else's that hold for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of a module, a class or an object are others."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
