"""When memory runs out in a backward: what waits there goes to the host, and the op runs again.

    watch = Watch(tell, room)   # one run
    with watch.running():       # a captured step's forward: each op's context joins
        loss = step(batch)
    loss.backward()             # an op that finds no memory makes room, tells, and runs again

An op's backward reads values and makes new ones, so running it again gives the same numbers. What
was moved comes back bit for bit when its own backward asks for it. It costs nothing until then: no
hook is set on what is saved before memory runs out. Copies from the host that are there before
anybody asked are let go, and what PyTorch caches is given back: it may be in pieces.

NOTE [Why not plan the step anew here]: ``loss.backward()`` is the user's call, and when it fails,
part of the gradients are in ``.grad`` already. Whoever is told plans the next step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor

from fxrl.ir.graph import copy_like
from fxrl.ops.host_memory import pool_of

T = TypeVar("T")


class MemoryWarning(UserWarning):
    """Memory ran out in a step, and the step went on."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory ran out in an op."""

    error: str  # PyTorch's own words
    op: int  # which of those that joined, by number
    used_bytes: int = 0  # what PyTorch had in use on the GPU; 0 on a CPU, where nobody counts
    pieces_bytes: int = 0  # what it held besides, free, but not in one piece
    moved_bytes: int = 0  # what was moved to the host for it
    let_go_bytes: int = 0  # what was on its way to the host, or back before it was asked for

    @classmethod
    def of(cls, error: torch.OutOfMemoryError, device: torch.device, op: int) -> Shortage:
        """Read off PyTorch where the error is caught, while what was made is still alive."""
        if device.type != "cuda":
            return cls(str(error), op)
        return cls(str(error), op, torch.cuda.memory_allocated(device), cached_bytes(device))


def free_bytes(device: torch.device) -> int | None:
    """What a new tensor on a GPU can get now; None elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + cached_bytes(device)


def cached_bytes(device: torch.device) -> int:
    """What PyTorch holds of a GPU and has not in use; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def give_back(device: torch.device) -> None:
    """Give a GPU what PyTorch caches, so that new tensors get memory in one piece again."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


class Watch:
    """One run of a captured step: what its ops keep, and who is told when memory runs out.

    Attributes:
        tell: hears of a shortage, and says it in words.
        room: bytes that may be moved to the host now.
    """

    def __init__(self, tell: Callable[[Shortage], str], room: Callable[[], int]) -> None:
        self.tell, self.room = tell, room
        self._contexts: list[tuple[ref[Any], Sequence[bool]]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the ops that run inside join."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)
            _WATCHES.add(self)

    @property
    def count(self) -> int:
        """The number of ops that joined."""
        return len(self._contexts)

    def join(self, ctx: Any, movable: Sequence[bool]) -> int:
        """An op's autograd context, and which of its saved tensors nobody else holds."""
        self._contexts.append((ref(ctx), movable))
        return self.count - 1

    def move(self, device: torch.device, room: int) -> int:
        """Move what waits on a device to the host, at most ``room`` bytes; how many it were."""
        moved = 0
        for context, movable in self._contexts:
            if (ctx := context()) is not None and moved < room:
                moved += _moved(ctx, movable, device)
        return moved


_RUNNING: ContextVar[Watch | None] = ContextVar("watch", default=None)
_WATCHES: WeakSet[Watch] = WeakSet()


def join(ctx: Any, movable: Sequence[bool] = ()) -> None:
    """Let an op's context join the step that runs now, if one does. In the op's setup_context."""
    ctx.watch, ctx.moved = _RUNNING.get(), False
    ctx.number = None if ctx.watch is None else ctx.watch.join(ctx, movable)


def with_room(ctx: Any, device: torch.device, run: Callable[[], T]) -> T:
    """The result of ``run``, an op's backward. If memory runs out, values that wait on the GPU are
    moved to the host and it runs once more; raises ``OutOfMemoryError`` if that was not enough."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        if ctx.watch is None:
            raise
        shortage = Shortage.of(error, device, ctx.number)
    # Behind the except block: until then the error's frames hold what the op had made.
    ctx.moved = True  # its own is being read
    room, moved = ctx.watch.room(), 0
    for watch in list(_WATCHES):
        moved += watch.move(device, room - moved)
    pool = pool_of(device)
    shortage = replace(shortage, moved_bytes=moved, let_go_bytes=pool.let_go())
    give_back(device)
    told = ctx.watch.tell(shortage)
    try:
        with pool.nothing_ahead():
            result = run()
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{told}; that was not enough: {error}") from None
    warnings.warn(f"{told}; it ran again, with the same numbers", MemoryWarning, stacklevel=2)
    return result


def _moved(ctx: Any, movable: Sequence[bool], device: torch.device) -> int:
    """Move what one context saved; bytes.

    NOTE [Why hooks so late]: autograd packs a saved tensor when a hook is registered, and drops its
    own. So only what has to move is ever touched.
    """
    if ctx.moved:
        return 0
    ctx.moved = True
    try:
        saved = ctx._raw_saved_tensors
    except RuntimeError:  # its backward ran, and nothing is there any more
        return 0
    moved = 0

    def to_host(x: Tensor) -> Tensor:
        nonlocal moved
        moved += x.nbytes
        return copy_like(x, device="cpu")

    for one, may in zip(saved, movable, strict=False):
        if may:
            one.register_hooks(to_host, lambda x: x.to(device, copy=True))
    return moved
