"""Run the graph as the user wrote it if the rewritten one fails at its first call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from fxrl.capture._torch import storage_of
from fxrl.capture.branches import (
    CannotBeginAnewError,
    follows_branches,
    has_checks,
    random_state,
)
from fxrl.capture.checks import CheckFailedError
from fxrl.capture.writes import undone
from fxrl.compile.outer import restore_checkpoints
from fxrl.errors import FxrlError, first_line

Run = Callable[..., Any]


class Guarded:
    """Runs a rewritten graph; if its first call fails, the user's own replaces it for good.

    NOTE [Why the first call]: if an op cannot run as rewritten, one run shows it. A later failure
    is due to the batch, and the user should see it.
    """

    def __init__(
        self,
        run: Run,
        gm: fx.GraphModule,
        written: Collection[int],
        early: Collection[int],
        fall_back: Callable[[str], None],
    ) -> None:
        """``written``: inputs that the graph writes into; ``early``: those ahead of its end."""
        self._run, self._gm, self._fall_back = run, gm, fall_back
        self._tried, self._follows, self._written = False, follows_branches(gm), written
        self._early, self._checked = early, has_checks(gm)

    def first(self, *args: Any) -> Any:
        if self._written and _shared(args, self._written):
            self._run, self._written = as_written(self._gm), ()
            self._fall_back("a tensor that is written into shares its memory with another one")
        may_end = self._follows or (self._checked and self._early)
        if self._tried and not may_end:
            return self._run(*args)
        random, written = random_state(), [args[at] for at in self._early]
        before = [tensor.detach().clone() for tensor in written]
        try:
            result = self._run(*args)
        except CheckFailedError:
            _put_back(written, before)
            raise
        except (FxrlError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            random()
            _put_back(written, before)
            if self._follows:
                self._check(*args)
                random()
            if self._tried:
                raise
            if self._follows:
                raise CannotBeginAnewError from error
            why = first_line(error)
            self._run = as_written(self._gm)
            result = self._run(*args)  # if the user's own code fails, this raises its error
            self._fall_back(f"the rewritten graph fails where the user's runs: {why}")
        self._tried = True
        return result

    def _check(self, *args: Any) -> None:
        """Raises ``CheckFailedError`` if the user's program would have failed a check first. In the
        rewritten graph, ops may run before a check that guarded them (and index out of bounds), and
        sizes are asserted as soon as they are known."""
        as_written(self._gm)
        try:
            with torch.no_grad(), undone(args):
                _Unasserted(self._gm).run(*args)
        except CheckFailedError:
            raise
        except Exception:  # it did not fail because of a check
            return


def _put_back(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Undo what a call wrote before it failed, since it is run again."""
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _shared(args: Sequence[Any], written: Collection[int]) -> bool:
    """Whether an argument shares memory with one that is written into; a functional graph assumes
    that none does."""
    tensors = [(at, arg) for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    places = {at: _place(arg) for at, arg in tensors if arg.layout == torch.strided}
    return any(
        at != other and storage == place[0] and first < place[2] and place[1] < end
        for at in places.keys() & written
        for storage, first, end in (places[at],)
        for other, place in places.items()
    )


def _place(tensor: torch.Tensor) -> tuple[int, Any, Any]:
    """Its storage, and the bytes from its first element to its last one."""
    first = tensor.storage_offset() * tensor.itemsize
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum((size - 1) * stride for size, stride in sizes) + 1 if tensor.numel() else 0
    return storage_of(tensor), first, first + length * tensor.itemsize


class _Unasserted(fx.Interpreter):
    """Runs a graph without what it asserts of sizes."""

    def run_node(self, n: fx.Node) -> Any:
        asserts = n.target is torch.ops.aten._assert_scalar.default
        return None if asserts else super().run_node(n)


def as_written(gm: fx.GraphModule) -> Run:
    """The user's own graph."""
    restore_checkpoints(gm)  # Dynamo's own calls recompute nothing on torch 2.11
    return gm.forward
