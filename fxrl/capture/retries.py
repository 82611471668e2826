"""What has failed and may pass is tried again.

NOTE [Why ever more seldom]: memory that was short, or a disk that was full, may be so for long, and
a capture that fails takes as long as one that succeeds. After ``n`` calls it was tried ``log2 n``
times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fxrl.ir.remark import Remark


def may_pass(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised for, is none that recurs by itself: memory was short,
    or the system failed. What only ``OSError`` says is a library's own word."""
    while error is not None:
        system = isinstance(error, OSError) and (type(error) is not OSError or error.errno)
        if system or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


@dataclass
class Wait:
    """Counts the calls until something is tried again that has failed.

    Attributes:
        told: what was said of that; it holds until then.
    """

    told: Remark | None = None
    _calls: float = 0.5
    _left: float = 0.0

    def begin(self, told: Remark | None, *, for_ever: bool) -> None:
        """It has failed, maybe again."""
        self.told = told
        self._left = self._calls = math.inf if for_ever else 2 * self._calls

    def is_over_now(self) -> bool:
        """Whether it is tried in the call at hand, as it then is in all later ones."""
        self._left -= 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        return self._left <= 0
