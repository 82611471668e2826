"""Products with a frozen weight of which each rank of a host holds a part, and rows of one.

    torch.ops.fxrl.sharded_mm(rows, [part], outputs, dtype, format, transpose)
    torch.ops.fxrl.sharded_rows(ids, [part], outputs, dtype, format)

``part`` is this rank's rows of the weight [N, K], as bytes: rank 0 has the first ones, and so on,
as many as all others, so that the last ones may have none for some of theirs. The product is ``rows
weight^T``, or ``rows weight`` where ``transpose``: bit for bit that of the weight in full, which is
brought together in a buffer and forgotten. The backward is the same product the other way round,
and keeps nothing but the part. ``sharded_rows`` is an embedding's lookup.

Of a weight in 8 or 4 bits (``fxrl.ops.dequantized`` names the formats; without, it is "") the
values are shared out, [N, K] or [N, K/2] bytes; the list has the scales as well, whole on every
rank. Some rows are brought together and widened at a time.

NOTE [Why pieces]: buffers for a vocabulary in full would take more than it does on each rank. What
is above ``PIECE`` bytes is read in pieces of its rows, and the products with them are joined, or
summed in float32.

NOTE [Why ranks read each other's memory]: ranks run unequal numbers of micro-batches, and one that
fails stops. A collective within a layer would wait for it for ever. Frozen parts never change, so
every rank of a host maps those of the others once, and copies what it needs when it needs it: no
rank waits for another one. On a CPU the parts are shared memory, which outlives whoever made it; on
GPUs CUDA IPC, whose owner must not end before the others are done.

NOTE [Why a product, and not a weight that is fetched for a region]: a weight in full is a value
that any graph, cut or autograd may keep, or read where nobody thought of it. What is multiplied by
a part can only be the product: eager code, regions of every cut and their backwards are right by
the same op, and what a layer has alive is one weight.

NOTE [Why two buffers]: while one is read the next weight comes into the other, on a stream of its
own. Which one is next was learned from the last time that these two weights followed each other; a
wrong guess costs a copy.
"""

from __future__ import annotations

import pickle
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from fxrl.errors import ConfigError, FxrlError
from fxrl.ops import check_rows, turned_backward
from fxrl.ops.dequantized import widened_rows
from fxrl.ops.fp8 import BLOCK
from fxrl.ops.linear_logprob.matmul import backproject, full_precision, product_dtype, slices

dist: Any = torch.distributed  # much of it has no types
#: Bytes of a weight that are brought together at a time, at most.
PIECE = 512 * 2**20
#: And of one in 8 or 4 bits, widened: forward and backward of 4096 rows with Qwen3-8B's head in FP8
#: take 27.3 ms with it, 38.9 with half of it, bound by launches, and 27.2 with twice (H200).
WIDENED = 256 * 2**20
_sharing: Any = torch.multiprocessing
#: What each rank has, by rank; all of them call it.
Gather = Callable[[Any], list[Any]]
#: What is done with some rows of a weight.
Reader = Callable[[slice, Tensor], None]


# ---------------------------------------------------------------------------- the ranks of a host
@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that run on this host."""

    rank: int  # this one's number among them
    members: tuple[int, ...]  # their numbers among all ranks
    gather: Gather  # brings all ranks' values together

    @classmethod
    def of(cls, gather: Gather | None = None) -> Peers:
        """Find them; all ranks call it. ``gather`` is by default
        ``torch.distributed.all_gather_object``. Raises ``ConfigError`` if there are no other ranks
        on this host."""
        if gather is None and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "weights are shared out over ranks, and this process is none: start several by "
                "torchrun --nproc-per-node, and call torch.distributed.init_process_group() first"
            )
        gather = gather or _gather_objects
        own = socket.gethostname(), uuid.uuid4().hex
        each = gather(own)
        members = tuple(rank for rank, (host, _) in enumerate(each) if host == own[0])
        if len(members) == 1:
            raise ConfigError(
                f"weights are shared out over the ranks of a host, and {own[0]} has one of "
                f"{len(each)}; start several there (torchrun --nproc-per-node)"
            )
        return cls(members.index(each.index(own)), members, gather)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def check_same(self, what: str, value: Any) -> None:
        """Refuse a value that is not the same on all ranks of this host; all of them call it."""
        each = self.gather(value)
        if differing := [rank for rank in self.members if each[rank] != value]:
            raise FxrlError(
                f"{what} of ranks {differing} are others than this rank's, so their parts do not "
                "go together; load the same checkpoint, or draw by the same seed, on every rank"
            )

    def map(self, part: Tensor) -> list[Tensor]:
        """Every rank's part. All ranks call it once their parts are written: tensors that own their
        memory, on the rank's device; on a CPU in shared memory."""
        with _by_name():  # a pickle for each: it may be read once
            mine = {to: bytes(ForkingPickler.dumps(part)) for to in self.members}
        each = self.gather(mine)
        me = self.members[self.rank]
        return [part if of == me else pickle.loads(each[of][me]) for of in self.members]


def _gather_objects(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def new_part(size: int, device: torch.device) -> Tensor:
    """Bytes that other processes may map."""
    part = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        with _by_name():
            part.share_memory_()  # type: ignore[no-untyped-call]
    return part


@contextmanager
def _by_name() -> Iterator[None]:
    """A CPU's memory is shared by a name: processes that torchrun started cannot hand each other
    open files."""
    before = _sharing.get_sharing_strategy()
    _sharing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        _sharing.set_sharing_strategy(before)


# ---------------------------------------------------------------------------- parts and buffers
Place = tuple[int, int, int, int]
"""Where a weight's part begins among all of a rank's, and how long it is; from where to where a
piece goes in the weight; all in bytes."""


def piece_rows(outputs: int, row_bytes: int, most: int | None = None) -> int:
    """Rows of a weight that are gathered at a time: all of them, or equal pieces of at most
    ``most`` bytes (None: ``PIECE``)."""
    return -(-outputs // max(1, -(-outputs * row_bytes // (most or PIECE))))


class Layout(NamedTuple):
    """What the bytes of a weight mean."""

    outputs: int  # its rows
    dtype: torch.dtype  # that they have when they are read
    format: str  # of its values, in 8 or 4 bits; "" where they are of the dtype

    def columns(self, row_bytes: int) -> Any:
        """Columns of a weight whose rows take ``row_bytes``."""
        if not self.format:
            return row_bytes // self.dtype.itemsize
        return row_bytes if self.format == "fp8" else 2 * row_bytes

    def step(self, row_bytes: int) -> int:
        """Rows that are brought together at a time."""
        if not self.format:
            return piece_rows(self.outputs, row_bytes)
        rows = piece_rows(self.outputs, self.columns(row_bytes) * self.dtype.itemsize, WIDENED)
        return min(self.outputs, -(-rows // BLOCK) * BLOCK)  # as scales by block want it

    def piece_bytes(self, row_bytes: int) -> int:
        """And the bytes of those, which a buffer has for them."""
        return self.step(row_bytes) * row_bytes

    def read(self, at: slice, rows: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """The rows ``at``, given as bytes, in the layout's dtype; ``weight`` is this rank's part
        and, of values in 8 or 4 bits, the scales."""
        if not self.format:
            return rows.view(self.dtype)
        return widened_rows([rows, *weight[1:]], self.format, self.dtype, at, self.outputs)


class _Buffer:
    """A buffer into which a piece of a weight is gathered."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Bytes of the largest one.
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds: Place | None = None  # the piece that it has, or that is on its way
        self.arrived: torch.Event | None = None  # when it is there; None on a CPU, where it is
        self.read: torch.Event | None = None  # when its last reader is done, likewise


class Shards:
    """The parts of a model's weights that the ranks of a host have, each in one piece of memory.

    ``parts`` are the bytes [S] of every rank, laid out alike, of which ``rank`` is this one's; the
    largest piece of a weight has ``largest`` bytes. With ``prefetch`` the next weight is brought
    while one is read, which is the default on a GPU.
    """

    def __init__(
        self, parts: Sequence[Tensor], rank: int, largest: int, *, prefetch: bool | None = None
    ) -> None:
        self.parts, self._own = tuple(parts), parts[rank]
        # Pieces that were brought together, and those of them begun before they were asked for.
        self.fetched = self.expected = 0
        device = self._own.device
        self._buffers = [_Buffer(largest, device), _Buffer(largest, device)]
        self._stream = torch.Stream(device) if device.type == "cuda" else None
        self._prefetch = self._stream is not None if prefetch is None else prefetch
        self._last: tuple[Place | None, Place | None] = None, None
        self._next: dict[Any, Place] = {}
        self._lock = threading.Lock()
        _ALIVE.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        return self  # as what is mapped is never written, a copy of a model has it in common

    def place(self, part: Tensor) -> tuple[int, int] | None:
        """The offset of a weight's part in this rank's memory; None if it is elsewhere."""
        start = part.data_ptr() - self._own.data_ptr()
        inside = part.device == self._own.device and 0 <= start < self._own.numel()
        return (start, part.nbytes) if inside else None

    def read(self, weight: Sequence[Tensor], layout: Layout, reader: Reader) -> None:
        """Call ``reader`` with a slice of the weight's rows and these rows, piece by piece; they
        are freed when it returns. ``weight`` as for ``Layout.read``."""
        place, width = self.place(weight[0]), weight[0].shape[1]
        assert place is not None
        with self._lock:  # whoever else asks would overwrite what is read
            for at in slices(layout.outputs, layout.step(width)):
                buffer = self._take((*place, at.start * width, at.stop * width))
                piece = buffer.memory[: (at.stop - at.start) * width]
                try:
                    reader(at, layout.read(at, piece.view(-1, width), weight))
                finally:
                    buffer.read = self._now()

    def product(
        self, rows: Tensor, weight: Sequence[Tensor], layout: Layout, *, turned: bool
    ) -> Tensor:
        """Rows times the weight of which the part is this rank's; see ``sharded_mm``."""
        if turned:
            return self._turned(rows, weight, layout)
        out = rows.new_empty(rows.shape[0], layout.outputs)

        def multiply(at: slice, weight: Tensor) -> None:
            torch.mm(rows, weight.to(rows.dtype).t(), out=out[:, at])

        self.read(weight, layout, multiply)
        return out

    def _turned(self, rows: Tensor, weight: Sequence[Tensor], layout: Layout) -> Tensor:
        made: list[Tensor] = []
        whole = layout.step(weight[0].shape[1]) == layout.outputs

        def multiply(at: slice, weight: Tensor) -> None:
            weight, some = weight.to(rows.dtype), rows[:, at]
            if whole:
                made.append(torch.mm(some, weight))
                return
            product = backproject(some.to(product_dtype(weight)), weight)
            made[:] = [made[0].add_(product) if made else product]

        with full_precision(rows.device.type, rows.dtype) if not whole else nullcontext():
            self.read(weight, layout, multiply)
        return made[0].to(rows.dtype)

    def rows(self, ids: Tensor, weight: Sequence[Tensor], layout: Layout) -> Tensor:
        """The weight's rows of these numbers; NaN on a GPU for numbers that it has not."""
        flat, outputs = ids.reshape(-1), layout.outputs
        check_rows(flat, outputs)
        made = [weight[0].new_full((), torch.nan, dtype=layout.dtype)]

        def take(at: slice, weight: Tensor) -> None:
            inside = (flat >= at.start) & (flat < at.stop)
            found = weight[(flat - at.start).clamp(0, len(weight) - 1)]
            made[0] = torch.where(inside[:, None], found, made[0])

        self.read(weight, layout, take)
        return made[0].view(*ids.shape, -1)

    def whole(self, weight: Sequence[Tensor], layout: Layout) -> Tensor:
        """A copy of the weight of which the part is this rank's."""
        place = self.place(weight[0])
        assert place is not None
        start, size = place
        parts = [one[start : start + size].to(weight[0].device) for one in self.parts]
        rows = torch.cat(parts).view(-1, weight[0].shape[1])[: layout.outputs]
        return layout.read(slice(0, layout.outputs), rows, weight)

    def _take(self, place: Place) -> _Buffer:
        """The buffer that has a piece; what comes next begins its way into the other one."""
        one, other = self._buffers  # by the time of their last reading
        if other.holds == place:
            one, other = other, one
        self.fetched += 1
        if one.holds == place:
            self.expected += 1
        else:
            self._begin(one, place, None)
        if one.arrived is not None:
            torch.cuda.current_stream(self._own.device).wait_event(one.arrived)
        if self._last[1] != place:
            self._next[self._last] = place
            self._last = self._last[1], place
        following = self._next.get(self._last)
        if self._prefetch and following not in (None, other.holds):
            self._begin(other, following, self._stream)
        self._buffers = [other, one]
        return one

    def _begin(self, into: _Buffer, place: Place, stream: torch.Stream | None) -> None:
        """Copy what every rank has of a piece, on this stream or the current one."""
        start, size, first, last = place
        into.holds = None  # an error leaves nothing that would be taken for a weight
        if self._stream is not None:
            current = stream or torch.cuda.current_stream(self._own.device)
            for event in (into.arrived, into.read):
                if event is not None:
                    current.wait_event(event)
        with nullcontext() if stream is None else stream:
            for rank, part in enumerate(self.parts):
                a, b = max(first, rank * size), min(last, (rank + 1) * size)
                if a < b:
                    there, begin = into.memory[a - first : b - first], start + a - rank * size
                    there.copy_(part[begin : begin + b - a], non_blocking=True)
            into.arrived = self._now(stream)
        into.holds = place

    def _now(self, stream: torch.Stream | None = None) -> torch.Event | None:
        """When all is done that this stream, or the current one, has been told so far."""
        if self._stream is None:
            return None
        event = torch.Event(self._own.device)
        event.record(stream or torch.cuda.current_stream(self._own.device))
        return event


_ALIVE: WeakSet[Shards] = WeakSet()


def shards_of(part: Tensor) -> Shards:
    """The shards that a weight's part belongs to."""
    found = next((one for one in _ALIVE if one.place(part) is not None), None)
    if found is None:
        raise FxrlError(
            f"a weight's part of {part.nbytes} bytes on {part.device} is no memory that ranks "
            "share: it was copied or moved; load the model where it shall run, and shard it then"
        )
    return found


# ---------------------------------------------------------------------------- the ops
@torch.library.custom_op(
    "fxrl::sharded_mm",
    mutates_args=(),
    schema="(Tensor rows, Tensor[] weight, int outputs, ScalarType dtype, str format, "
    "bool transpose) -> Tensor",
)
def sharded_mm(
    rows: Tensor,
    weight: Sequence[Tensor],
    outputs: int,
    dtype: torch.dtype,
    format: str,
    transpose: bool,
) -> Tensor:
    """The product of ``rows`` [M, K] ([M, N] if ``transpose``) with a weight of N = ``outputs``
    rows, of which ``weight`` is this rank's part: bytes [N / ranks, K * itemsize], and the scales
    of a format.

    ``dtype`` is the weight's; the product is made in the dtype of the rows, in which a weight of a
    format is widened. The part must lie in memory that the ranks share.
    """
    layout = Layout(outputs, rows.dtype if format else dtype, format)
    return shards_of(weight[0]).product(rows, weight, layout, turned=transpose)


@sharded_mm.register_fake
def _(rows: Tensor, weight: Sequence[Tensor], *options: Any) -> Tensor:
    *fields, transpose = options
    layout = Layout(*fields)
    columns = layout.columns(weight[0].shape[1]) if transpose else layout.outputs
    return rows.new_empty((rows.shape[0], columns))


turned_backward(sharded_mm)


@torch.library.custom_op(
    "fxrl::sharded_rows",
    mutates_args=(),
    schema="(Tensor ids, Tensor[] weight, int outputs, ScalarType dtype, str format) -> Tensor",
)
def sharded_rows(
    ids: Tensor, weight: Sequence[Tensor], outputs: int, dtype: torch.dtype, format: str
) -> Tensor:
    """See the module; ``ids`` have any shape, ``weight``, ``outputs`` and ``format`` are as in
    ``sharded_mm``, and rows are returned in ``dtype``. Raises ``FxrlError`` if the part is not
    memory that ranks share, ``IndexError``, on a CPU, if there is no such row."""
    return shards_of(weight[0]).rows(ids, weight, Layout(outputs, dtype, format))


@sharded_rows.register_fake
def _(ids: Tensor, weight: Sequence[Tensor], *fields: Any) -> Tensor:
    layout = Layout(*fields)
    width = layout.columns(weight[0].shape[1])
    return weight[0].new_empty((*ids.shape, width), dtype=layout.dtype)
