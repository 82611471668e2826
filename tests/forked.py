"""Processes that begin with all that the tests' one has imported, which takes seconds."""

from collections.abc import Callable
from typing import Any

import torch


def in_processes(work: Callable[..., object], *args: Any, count: int = 2) -> None:
    """``work(rank, *args)`` in each of ``count`` processes.

    Before torch 2.13 autograd refuses to run in a fork behind some captures: there they are
    spawned.
    """
    method = "spawn" if torch.__version__ < "2.13" else "fork"
    torch.multiprocessing.start_processes(work, args, count, start_method=method)
