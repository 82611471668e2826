"""What reward functions and losses may not change.

Whether they do by intent (a sandbox that changes folders) or by accident (autograd switched off and
never on again), the rest of the run must not notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Switches of the whole process that user code may change, as they were when this was made.

    It is made once and not before each call, because calls run beside each other.
    """

    folder: str = field(default_factory=os.getcwd)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Autograd is on in the block; after it, it is as before it, and the rest is put back."""
        try:
            with torch.enable_grad():
                yield
        finally:
            torch.set_default_dtype(self.dtype)
            with suppress(OSError):  # the folder is gone, and no function's fault
                os.chdir(self.folder)
