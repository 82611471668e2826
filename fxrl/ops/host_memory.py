"""Tensors that wait in host memory between forward and backward, moved while the GPU computes.

    forward    y = layer_i(x)        x, o  --side stream-->  pages of pinned host memory
    backward   grad of layer_i       x, o  <--side stream--  begun while layer i+1's gradient runs

Values come back bit for bit. What was stored last is asked for first; who fetches lets those stored
before set out, too, so that a transfer hides behind the backward of the layers in between. How many
may be on their way is said by who stores: GPU memory is held until a store has arrived, and taken
when a way back begins, so it follows from the order of the calls alone, never from how fast copies
are. On a CPU the pages are plain memory and copies are done when they are asked for.

NOTE [Why pages]: batches differ in length, so buffers of a tensor's size would never fit again, and
PyTorch's own pinned allocator rounds up to powers of two. The tensors of one store lie behind each
other in pages of one size; what is wasted is less than a page a store.

NOTE [Why the driver is given memory instead of asked for it]: what it allocates itself it clears by
one thread, small page by small page: 2 GiB/s on an H200's host, so that the first step of 262,144
tokens waited a minute for 118 GiB. Huge pages that several threads have entered and cleared before
they are registered came with 12 to 15 GiB/s, a GiB at a time; ``reserve`` makes most of them while
kernels are compiled.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxrl.errors import HostMemoryError, reason_of

PAGE = 16 * 2**20
#: Pages that are registered at once; each call of the driver takes some milliseconds.
_PAGES_AT_ONCE = 16
#: Where nobody says how many: stores that may be on their way at once, and fetches ahead of one.
_SENDING, _FETCHING = 2, 1
_MAKERS = 8  # threads that make pages
_MADV_POPULATE_WRITE = 23  # which Python's mmap does not name
_POOLS: dict[torch.device, HostPool] = {}
_LOCK = threading.RLock()
_MADE = threading.Condition(_LOCK)


def pool_of(device: torch.device) -> HostPool:
    """The pages that belong to a device; they live as long as the process."""
    with _LOCK:
        return _POOLS.setdefault(device, HostPool(device))


def bytes_held() -> int:
    """Host memory of all pools, in use or free."""
    with _LOCK:
        return sum(pool.bytes for pool in _POOLS.values())


def drop_free_pages() -> None:
    """Forget the pages of all pools that hold nothing now; PyTorch may take their memory anew."""
    with _LOCK:
        for pool in _POOLS.values():
            pool.drop_free_pages()


class HostPool:
    """Pages of host memory for the tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0  # of all pages, in use or free
        self._wanted = 0  # bytes of pages that there should be
        self._begun = 0  # pages that are in the making
        self._refused = ""  # why no more were made; an error would hold the frames that it went by
        self._free: list[Tensor] = []
        self._sent: deque[tuple[torch.Event, list[Tensor]]] = deque()
        self._last: weakref.ref[Stored] | None = None
        self._ahead = True  # whether who fetches lets others set out
        self._stored: weakref.WeakSet[Stored] = weakref.WeakSet()
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def reserve(self, size: int) -> None:
        """Begin to make pages, so many bytes in all; who stores will say it if there are less."""
        with _LOCK:
            self._wanted = max(self._wanted, size)
            makers = min(_MAKERS, -(-self._missing() // _PAGES_AT_ONCE))
            for _ in range(makers):
                threading.Thread(target=self._make, name="fxrl-pages", daemon=True).start()

    def store(
        self, tensors: Sequence[Tensor], *, sending: int = _SENDING, fetching: int = _FETCHING
    ) -> Stored:
        """Begin to copy tensors to the host; the caller may drop them at once. Without tensors it
        only takes its turn: it waits for earlier stores, and starts fetches like any other.

        When it returns, at most ``sending`` stores, this one included, are still on their way. When
        it is fetched, ``fetching`` of the stores before it begin their way back too.
        """
        flats = [_flat(x) for x in tensors]
        with _LOCK:
            pages = self._take(flats)
            if flats and (arrived := self._begin(_pieces(flats, pages))) is not None:
                self._sent.append((arrived, flats))
            self.wait(sending)
            stored = Stored(self, tensors, pages, self._last, fetching)
            self._stored.add(stored)
            if flats:
                self._last = weakref.ref(stored)
        return stored

    def wait(self, sending: int = 0) -> None:
        """Let the GPU wait until no more stores are on their way; the memory of others is free."""
        while len(self._sent) > sending:
            event, _ = self._sent.popleft()
            torch.cuda.current_stream(self.device).wait_event(event)

    def let_go(self) -> int:
        """Free the GPU memory of what has left for the host, and of what came back before anybody
        asked for it (it is copied again when somebody does); bytes."""
        with _LOCK:
            freed = sum(flat.numel() for _, flats in self._sent for flat in flats)
            self.wait()
            return freed + sum(stored.let_go() for stored in list(self._stored))

    @contextmanager
    def nothing_ahead(self) -> Iterator[None]:
        """Inside, a fetch brings back only what it asks for."""
        self._ahead = False
        try:
            yield
        finally:
            self._ahead = True

    def room_for(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Pages, and the parts of tensors as bytes, each with its place in them; for copies by the
        caller, on its own stream."""
        flats = [_flat(x) for x in tensors]
        with _LOCK:
            pages = self._take(flats)
        if self._stream is not None:  # what the pages held may still be on its way
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return pages, list(_pieces(flats, pages))

    def take_back(self, pages: Sequence[Tensor]) -> None:
        """Pages that nobody reads any more."""
        with _LOCK:
            self._free += pages

    def drop_free_pages(self) -> None:
        """Forget the pages that hold nothing now."""
        self._wanted = 0
        if self._stream is not None:  # what they held may still be on its way
            self._stream.synchronize()
        self.bytes -= PAGE * len(self._free)
        self._free.clear()

    def copy(self, flats: Sequence[Tensor], pages: Sequence[Tensor]) -> torch.Event | None:
        """Begin to copy pages into flat tensors; the event says when they are there."""
        return self._begin((place, flat) for flat, place in _pieces(flats, pages))

    def _begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.Event | None:
        """Copy the first of each pair to the second, behind what the GPU was told so far."""
        if self._stream is None:
            for source, place in pairs:
                place.copy_(source)
            return None
        arrived = torch.Event(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # it may use the memory
        with self._stream:
            for source, place in pairs:
                place.copy_(source, non_blocking=True)
            arrived.record(self._stream)
        return arrived

    def _take(self, flats: Sequence[Tensor]) -> list[Tensor]:
        count = -(-sum(flat.numel() for flat in flats) // PAGE)
        self._refused = ""
        while (missing := count - len(self._free)) > 0:
            if self._refused:
                raise self._error(missing)
            self.reserve(self.bytes + PAGE * missing)
            _MADE.wait()
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _missing(self) -> int:
        """Pages that are wanted and nobody makes."""
        return -(-(self._wanted - self.bytes) // PAGE) - self._begun

    def _make(self) -> None:
        """Make pages until there are as many as are wanted."""
        while True:
            with _LOCK:
                count = min(self._missing(), _PAGES_AT_ONCE)
                if count <= 0:
                    return
                self._begun += count
            made: tuple[Tensor, ...] = ()
            refused = ""
            try:
                made = self._pages(count)
            except (OSError, RuntimeError) as error:  # PyTorch raises nothing narrower
                refused = reason_of(error)
            with _LOCK:
                self._begun -= count
                self._free += made
                self.bytes += PAGE * len(made)
                if refused:
                    self._refused, self._wanted = refused, 0
                _MADE.notify_all()

    def _pages(self, count: int) -> tuple[Tensor, ...]:
        """Raises ``OSError`` or ``RuntimeError``."""
        pinned, size = self._stream is not None, count * PAGE
        whole = pinned_bytes(self.device, size) if pinned else torch.empty(size, dtype=torch.uint8)
        return whole.view(count, PAGE).unbind()

    def _error(self, missing: int) -> HostMemoryError:
        kind = "host memory" if self._stream is None else "pinned host memory"
        return HostMemoryError(
            f"there is no {kind} for what layers keep: {self.bytes / 2**30:.1f} GiB are held, "
            f"and the next {missing * PAGE >> 20} MiB were refused ({self._refused}); cure: "
            "a smaller Config(host_memory=...), or a larger limit of the container",
            self._refused,
        )


def pinned_bytes(device: torch.device, size: int) -> Tensor:
    """``[size]`` uint8 that a GPU reaches by itself. Raises ``OSError`` or ``RuntimeError``."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    holder = np.frombuffer(memory, dtype=np.uint8)  # what finalize can watch, and the tensor holds
    _populate(holder)
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        status = cuda.cudaHostRegister(holder.ctypes.data, size, 0)
        if status != cuda.cudaError.success:
            with suppress(RuntimeError):  # CUDA would tell whoever launches next, too
                torch.zeros(1, device=device)
            torch.cuda.check_error(status)
    # With the mapping, which may be gone otherwise: numpy 2.5 lets go of it before it calls.
    end = weakref.finalize(holder, _unpin, device, holder.ctypes.data, memory)
    end.atexit = False  # the driver is gone by then
    return torch.from_numpy(holder)


def _populate(memory: np.ndarray[Any, Any]) -> None:
    """Enter and clear memory in the kernel, which refuses where writing to it would end the
    process. By C, which lets Python go on meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    if libc.madvise(address, size, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # before Linux 5.14: whoever registers it does so
            raise OSError(number, os.strerror(number))


def _unpin(device: torch.device, address: int, _: mmap.mmap) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Stored:
    """What one layer keeps, on the host."""

    def __init__(
        self,
        pool: HostPool,
        tensors: Sequence[Tensor],
        pages: list[Tensor],
        before: weakref.ref[Stored] | None,
        fetching: int,
    ) -> None:
        self._pool, self._pages, self._before, self._fetching = pool, pages, before, fetching
        self._looks = [(x.shape, x.stride(), x.dtype) for x in tensors]
        self._found: list[Tensor] | None = None
        self._arrived: torch.Event | None = None
        self._lent = False

    def start(self) -> None:
        """Begin the way back, where it has not begun."""
        with _LOCK:
            if self._found is None and not self._lent:
                self._found = [
                    torch.empty_strided(shape, stride, dtype=dtype, device=self._pool.device)
                    for shape, stride, dtype in self._looks
                ]
                flats = [_flat(x) for x in self._found]
                self._arrived = self._pool.copy(flats, self._pages) if flats else None

    def fetch(self, *, ahead: bool = True) -> list[Tensor]:
        """The tensors as they were; of those stored before them, as many as was said set out. Not
        so with ``ahead=False``: the caller holds them until it says ``set_out`` itself, and nobody
        else lets them set out once more."""
        with _LOCK:
            self._pool.wait()
        self._lent = False
        self.start()
        found = self._taken()  # the caller's; another backward copies again
        if ahead:
            self.set_out()
        self._lent = not ahead
        return found

    def set_out(self) -> None:
        """Let as many of those stored before begin their way back as was said; the caller needs its
        own no more."""
        self._lent = False
        before = self._before
        for _ in range(self._fetching if self._pool._ahead else 0):
            if before is None or (stored := before()) is None:
                break
            stored.start()
            before = stored._before

    def let_go(self) -> int:
        """Undo ``start``; bytes."""
        return sum(x.nbytes for x in self._taken())

    def _taken(self) -> list[Tensor]:
        """The tensors of the fetch that was begun, once they have arrived; their memory is now the
        caller's."""
        found, self._found = self._found or [], None
        if found and self._arrived is not None:
            torch.cuda.current_stream(self._pool.device).wait_event(self._arrived)
        return found

    def __del__(self) -> None:
        self._taken()
        self._pool.take_back(self._pages)


def can_wait(x: Tensor) -> bool:
    """Whether a tensor is memory that can be moved: no gaps in it, and no stand-in for a tensor."""
    pairs = zip(x.shape, x.stride(), strict=True)
    plain = type(x) in (Tensor, torch.nn.Parameter)
    return plain and x.numel() == 1 + sum((size - 1) * stride for size, stride in pairs)


def _flat(x: Tensor) -> Tensor:
    """A dense tensor's memory as bytes, whatever the order of its dims."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset()).view(torch.uint8)


def _pieces(flats: Sequence[Tensor], pages: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the tensors and where in the pages they lie."""
    place = 0
    for flat in flats:
        at = 0
        while at < flat.numel():
            page, offset = divmod(place, PAGE)
            size = min(PAGE - offset, flat.numel() - at)
            yield flat[at : at + size], pages[page][offset : offset + size]
            at, place = at + size, place + size
