"""``fxrl::sharded_mm``: rows times a frozen weight of which each rank of a host holds a part.

    torch.ops.fxrl.sharded_mm(rows, [part], ranks, dtype, transpose)

``part`` is this rank's [N / ranks, K] of the weight [N, K], as bytes: rank 0 has the first rows,
and so on. The product is ``rows weight^T``, or ``rows weight`` where ``transpose``: bit for bit
that of the weight in full, which is brought together in a buffer and forgotten. The backward is the
same product the other way round, and keeps nothing but the part.

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
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from fxrl.errors import ConfigError, FxrlError

dist: Any = torch.distributed  # much of it has no types
_sharing: Any = torch.multiprocessing
#: What each rank has, by rank; all of them call it.
Gather = Callable[[Any], list[Any]]


# ---------------------------------------------------------------------------- the ranks of a host
@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that run on this host.

    Attributes:
        rank: this one's number among them.
        members: their numbers among all ranks.
        gather: brings all ranks' values together.
    """

    rank: int
    members: tuple[int, ...]
    gather: Gather

    @classmethod
    def of(cls, gather: Gather | None = None) -> Peers:
        """Find them; all ranks call it.

        Args:
            gather: None is ``torch.distributed.all_gather_object``.

        Raises:
            ConfigError: there are no other ranks, or not on this host.
        """
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
        """How many they are."""
        return len(self.members)

    def check_same(self, what: str, value: Any) -> None:
        """All ranks call it.

        Raises:
            FxrlError: not all of this host have the same value.
        """
        each = self.gather(value)
        if differing := [rank for rank in self.members if each[rank] != value]:
            raise FxrlError(
                f"{what} of ranks {differing} are others than this rank's, so their parts do not "
                "go together; load the same checkpoint, or draw by the same seed, on every rank"
            )

    def map(self, part: Tensor) -> list[Tensor]:
        """Everyone's part, by rank; all ranks call it, when what they give is written.

        Args:
            part: a tensor that owns its memory, on this rank's device; on a CPU, shared.
        """
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
Place = tuple[int, int]
"""Where a weight's part begins among all of a rank's, and how long it is, in bytes."""


class _Buffer:
    """Where a weight is brought together.

    Attributes:
        memory: bytes of the largest one.
        holds: the weight that it has, or that is on its way.
        arrived: when it is there; None on a CPU, where it is.
        read: when its last reader is done, likewise.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds: Place | None = None
        self.arrived: torch.Event | None = None
        self.read: torch.Event | None = None


class Shards:
    """The parts of a model's weights that the ranks of a host have, each in one piece of memory.

    Args:
        parts: bytes [S] of every rank, laid out alike, by rank.
        rank: which of them is this one's.
        largest: bytes of the largest weight in full.
        prefetch: bring the next weight while one is read; None where that is done meanwhile, on a
            GPU.

    Attributes:
        parts: as given.
        fetched: how many weights were brought together.
        expected: how many of them had begun before they were asked for.
    """

    def __init__(
        self, parts: Sequence[Tensor], rank: int, largest: int, *, prefetch: bool | None = None
    ) -> None:
        self.parts, self._own = tuple(parts), parts[rank]
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

    def place(self, part: Tensor) -> Place | None:
        """Where a weight's part lies in this rank's memory; None where it does not."""
        start = part.data_ptr() - self._own.data_ptr()
        inside = part.device == self._own.device and 0 <= start < self._own.numel()
        return (start, part.nbytes) if inside else None

    def product(self, rows: Tensor, part: Tensor, dtype: torch.dtype, *, turned: bool) -> Tensor:
        """Rows times the weight of which ``part`` is this rank's; see ``sharded_mm``."""
        place = self.place(part)
        assert place is not None
        with self._lock:  # whoever else asks would overwrite what is read
            buffer = self._take(place)
            weight = _matrix(buffer.memory[: len(self.parts) * place[1]], part, dtype)
            weight = weight.to(rows.dtype)
            made = torch.mm(rows, weight if turned else weight.t())
            buffer.read = self._now()
        return made

    def whole(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the weight of which ``part`` is this rank's."""
        place = self.place(part)
        assert place is not None
        start, size = place
        parts = [one[start : start + size].to(part.device) for one in self.parts]
        return _matrix(torch.cat(parts), part, dtype)

    def _take(self, place: Place) -> _Buffer:
        """The buffer that has a weight; what comes next begins its way into the other one."""
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
        """Copy every rank's part of a weight, on this stream or the current one."""
        start, size = place
        into.holds = None  # an error leaves nothing that would be taken for a weight
        if self._stream is not None:
            current = stream or torch.cuda.current_stream(self._own.device)
            for event in (into.arrived, into.read):
                if event is not None:
                    current.wait_event(event)
        with nullcontext() if stream is None else stream:
            for rank, part in enumerate(self.parts):
                there = into.memory[rank * size : (rank + 1) * size]
                there.copy_(part[start : start + size], non_blocking=True)
            into.arrived = self._now(stream)
        into.holds = place

    def _now(self, stream: torch.Stream | None = None) -> torch.Event | None:
        """When all is done that this stream, or the current one, has been told so far."""
        if self._stream is None:
            return None
        event = torch.Event(self._own.device)
        event.record(stream or torch.cuda.current_stream(self._own.device))
        return event


def _matrix(memory: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight's bytes as the weight [N, K] that ``part`` is a part of."""
    return memory.view(-1, part.shape[1]).view(dtype)


_ALIVE: WeakSet[Shards] = WeakSet()


def shards_of(part: Tensor) -> Shards:
    """The shards that a weight's part belongs to.

    Raises:
        FxrlError: it is a copy, or its shards are gone.
    """
    found = next((one for one in _ALIVE if one.place(part) is not None), None)
    if found is None:
        raise FxrlError(
            f"a weight's part of {part.nbytes} bytes on {part.device} is no memory that ranks "
            "share: it was copied or moved; load the model where it shall run, and shard it then"
        )
    return found


# ---------------------------------------------------------------------------- the product
@torch.library.custom_op(
    "fxrl::sharded_mm",
    mutates_args=(),
    schema="(Tensor rows, Tensor[] weight, int ranks, ScalarType dtype, bool transpose) -> Tensor",
)
def sharded_mm(
    rows: Tensor, weight: Sequence[Tensor], ranks: int, dtype: torch.dtype, transpose: bool
) -> Tensor:
    """See the module.

    Args:
        rows: [M, K], or [M, N] where ``transpose``.
        weight: this rank's part of it alone, as bytes [N / ranks, K * itemsize].
        ranks: that have a part.
        dtype: of the weight; the product is made in the rows'.

    Raises:
        FxrlError: the part is no memory that ranks share.
    """
    (part,) = weight
    return shards_of(part).product(rows, part, dtype, turned=transpose)


@sharded_mm.register_fake
def _(
    rows: Tensor, weight: Sequence[Tensor], ranks: int, dtype: torch.dtype, transpose: bool
) -> Tensor:
    outputs, width = weight[0].shape
    columns = width // dtype.itemsize if transpose else outputs * ranks
    return rows.new_empty((rows.shape[0], columns))


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, weight, ctx.ranks, ctx.dtype, ctx.transpose = inputs
    ctx.save_for_backward(*weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, product = list(ctx.saved_tensors), torch.ops.fxrl.sharded_mm.default
    made = product(grad, weight, ctx.ranks, ctx.dtype, not ctx.transpose)
    return made, [None], None, None, None


sharded_mm.register_autograd(_backward, setup_context=_setup_context)
