"""Processes that begin with all that the tests' one has imported, which takes seconds."""

import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def autograd_forks() -> bool:
    """Whether autograd runs in a fork: before torch 2.13 it refuses to behind some captures."""
    child = torch.multiprocessing.get_context("fork").Process(target=_backward)
    child.start()
    child.join()
    assert not child.exitcode or torch.__version__ < "2.13"
    return not child.exitcode


def _backward() -> None:
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        os._exit(1)


def need_autograd_in_forks() -> None:
    """Skips a test that would fork ranks which differentiate."""
    if not autograd_forks():
        pytest.skip("autograd refuses to run in a fork behind what was captured here")


def in_processes(work: Callable[..., object], *args: Any, count: int = 2) -> None:
    """``work(rank, *args)`` in each of ``count`` processes.

    Before torch 2.13 autograd refuses to run in a fork behind some captures: there they are
    spawned.
    """
    method = "spawn" if torch.__version__ < "2.13" else "fork"
    torch.multiprocessing.start_processes(work, args, count, start_method=method)


def run_forked(script: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a file that is run as a script, and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.argv = [str(script), *arguments]
            code = 1
            try:
                runpy.run_path(str(script), run_name="__main__")
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()
