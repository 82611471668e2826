"""The processes of one run: what they share, and how they end together.

``torchrun --nproc-per-node 4 -m fxrl train run.toml`` starts four; each is a rank. A process that
was started alone is rank 0 of 1 and goes through the same code.

NOTE [Where ranks wait]
A collective begins when all ranks have come to it: they count themselves in the group's store, and
look every second whether another has failed, died, or been silent. So no collective waits for a
rank that is slow (its completions are long, it compiles): it is over as soon as its bytes have
moved. And whoever waits for a rank that will not come ends with a reason:

    a rank raised           within a second
    its process is gone     within a second on the same host, else within ``SILENT_S``
    it lives and does not come                             within ``PATIENCE_S``
    the network goes while bytes move                      within ``COLLECTIVE_S``

Ranks that share a sequence send within their steps, where nobody meets. One that raises leaves
their groups, so on a CPU the others hear of it as soon; on GPUs, within ``COLLECTIVE_S``.

Whoever holds what all need to be saved (``regroup``) waits for the others once more.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.errors import ConfigError, FxrlError, shown

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V", bound=torch.Tensor)
dist: Any = torch.distributed  # it exports its stores without saying so

SILENT_S = 120.0
"""Every rank says every few seconds that it lives, by a thread; one call into C may hold it up."""
PATIENCE_S = 1800.0
"""One rank's completions may take that much longer than another's."""
COLLECTIVE_S = 300.0
_BEAT_S, _LOOK_S = 5.0, 1.0
BUCKET_BYTES = 2**29
"""Summed by one collective. The gradients of an adapter fit into one; the copy of larger ones must
not take as much memory as they do."""
_RUNS = itertools.count()


class RankError(FxrlError):
    """Another rank failed or is gone, or ranks differ in what they must have alike."""

    def __init__(self, text: str, teller: int = 0) -> None:
        super().__init__(text)
        self.teller = teller  # the rank that tells people


@dataclass(slots=True)
class Ranks:
    """This process and its peers; by itself a single one."""

    rank: int = 0  # from 0 on; rank 0 is the primary, which alone writes and talks
    size: int = 1  # how many there are
    wait_s: float = 0.0  # seconds that this rank has waited for others
    exposed_s: float = 0.0  # seconds of sums that no backward hid, slower GPUs' among them
    _lobby: _Lobby | None = field(default=None, repr=False)

    @property
    def primary(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; they are pickled."""
        if self._lobby is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.meet()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.finish(dist.all_gather(sizes, torch.tensor([len(data)]), async_op=True))
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.finish(dist.all_gather(parts, padded, async_op=True))
        cut = (part[:n].numpy().tobytes() for part, n in zip(parts, lengths, strict=True))
        return [pickle.loads(part) for part in cut]

    def every(self, values: Iterable[T], sharing: int = 1) -> list[T]:
        """The values of all ranks, concatenated; see ``gather``. ``sharing`` consecutive ranks have
        the same values, which are taken once."""
        return [value for part in self.gather([*values])[::sharing] for value in part]

    def broadcast(self, value: T) -> T:
        """The primary's value."""
        return self.gather(value if self.primary else None)[0]  # type: ignore[return-value]

    def check_same(self, what: str, value: Any) -> None:
        """Raises where not all ranks have the same value."""
        first, *others = self.gather(value)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise RankError(
                    f"{what}: rank 0 has {shown(first)} and rank {rank} has {shown(other)}; all "
                    "ranks need the same files, packages and kind of GPU"
                )

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Adds tensors up over the ranks, in place; all ranks give the same shapes.

        Sums are bit for bit the same on every rank.
        """
        if self._lobby is None or not tensors:
            return
        self.meet()
        sum_into(tensors, tensors, lambda flat: self.finish(self.begin_sum(flat)))

    def begin_sum(self, flat: Tensor) -> Any:
        """Begins to add a tensor up over the ranks, in place, and does not wait; they have met, and
        all begin the same in the same order. ``finish`` waits for what is returned."""
        return dist.all_reduce(flat, async_op=True)

    @contextmanager
    def exposed(self, device: torch.device) -> Iterator[None]:
        """Counts the block as ``exposed_s``; on a GPU from the end of what was queued ahead."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self.exposed_s += time.perf_counter() - start
            return
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        yield
        end.record()
        end.synchronize()
        self.exposed_s += begin.elapsed_time(end) / 1000

    def collect(self, parts: Mapping[K, T]) -> dict[K, T]:
        """On the primary, the parts of all ranks, received one by one; elsewhere this rank's own.
        Parts are pickled, so their tensors must be on the CPU."""
        found, cpu = dict(parts), torch.device("cpu")
        received: list[Any] = [None]
        for rank, keys in enumerate(self.gather(list(parts))):
            if not rank:
                continue
            self.meet()  # its turn: nobody waits in a collective for those before
            with self.watched():
                for key in keys:
                    if self.rank == rank:
                        dist.send_object_list([parts[key]], 0, device=cpu)
                    elif self.primary:
                        dist.recv_object_list(received, rank, device=cpu)
                        found[key] = received[0]
        return found

    def meet(self) -> None:
        """Waits until all ranks are here."""
        if self._lobby is not None:
            self.wait_s += self._lobby.meet()

    def regroup(self, told: str | None) -> None:
        """After a failure, wait until all ranks have heard of it and are here, to save the part
        that each has. ``told`` is what to tell the others if this rank has failed."""
        if self._lobby is not None:
            if told is not None:
                self.fail(told)
            self._lobby.again()
            self.meet()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around collectives: an error in one means that a rank has gone."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # gloo's and NCCL's
            if self._lobby is not None:
                pause = _Pause(self._lobby.look)
                while pause.seconds < 2 * _LOOK_S:  # who it was is soon known
                    pause()
            raise

    def fail(self, told: str) -> None:
        """Lets the others know that this rank ends, and why; the first to do so is heard."""
        if self._lobby is not None:
            self._lobby.close(self.rank, told)

    def finish(self, work: Any) -> None:
        assert self._lobby is not None
        pause = _Pause(self._lobby.look, longest_s=5e-4)
        try:
            with self.watched():
                while not work.is_completed():
                    pause()
                work.wait()
        except RuntimeError as error:
            raise RankError(f"a rank went away within a collective: {error}") from error


def deal(costs: Sequence[float], size: int) -> list[list[int]]:
    """Numbers of the costs, dealt to ``size`` hands: the dearest first, to who has least so far
    (LPT: no hand has more than 4/3 of what the best deal gives it)."""
    hands: list[list[int]] = [[] for _ in range(size)]
    least = [(0.0, hand) for hand in range(size)]
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, hand = least[0]
        heapq.heapreplace(least, (total + costs[number], hand))
        hands[hand].append(number)
    return [sorted(hand) for hand in hands]


def ranks_of_host() -> int:
    """How many processes of the run share this host's memory."""
    return max(1, _number("LOCAL_WORLD_SIZE", 1)) if _number("WORLD_SIZE", 1) > 1 else 1


@contextmanager
def joined(in_words: Callable[[BaseException], str] = str) -> Iterator[Ranks]:
    """Join the ranks that torchrun has started; without torchrun, be alone. ``in_words`` is what
    other ranks say of an error that ends this one.

    Nobody leaves the block before the primary, which has the run's state to save: torchrun ends all
    processes as soon as one has failed. Raises ``ConfigError`` if the environment is not a rank's,
    or somebody else has made the process group.
    """
    ranks = _of_environment()
    if ranks._lobby is None:
        yield ranks
        return
    try:
        yield ranks
    except BaseException as error:
        if not isinstance(error, RankError):
            ranks.fail(in_words(error))
            error.add_note(f"this is of rank {ranks.rank} of {ranks.size}")
        ranks._lobby.leave(failed=True)
        raise
    ranks._lobby.leave()
    if dist.is_initialized():  # vLLM may have ended it with its own groups
        dist.destroy_process_group()


def _of_environment() -> Ranks:
    size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if size == 1:
        return Ranks()
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={size}; torchrun sets both")
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialized already, and fxrl does that itself; leave "
            "init_process_group out"
        )
    local, backend = _number("LOCAL_RANK", 0), "gloo"
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {rank} is number {local} of its host, which has "
                f"{torch.cuda.device_count()} GPUs; lower --nproc-per-node"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    base, _, _ = next(iter(dist.rendezvous("env://", rank, size)))
    store = dist.PrefixStore(f"fxrl/{next(_RUNS)}", base)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    return Ranks(rank, size, _lobby=_Lobby(store, rank, size))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number; torchrun sets it") from None


def sum_into(
    sums: Sequence[Tensor], tensors: Sequence[V], add_up: Callable[[Tensor], object]
) -> None:
    """Writes into ``sums`` what ``tensors`` come to over ranks, in float32 or a wider dtype of
    theirs and rounded once; ``add_up`` adds a tensor up, in place. Both may be the same tensors."""
    places = dict(zip(map(id, tensors), sums, strict=True))
    for bucket in buckets(tensors, BUCKET_BYTES):
        flat, parts = flattened(bucket)
        for tensor, part in zip(bucket, parts, strict=True):
            part.copy_(tensor)
        add_up(flat)
        for tensor, part in zip(bucket, parts, strict=True):
            places[id(tensor)].copy_(part)


def flattened(bucket: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Memory for the sums of a bucket, in one piece, and the part of each of its tensors."""
    wide = wide_dtype(bucket[0].dtype)
    flat = bucket[0].new_empty(sum(tensor.numel() for tensor in bucket), dtype=wide)
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    return flat, [part.view(t.shape) for t, part in zip(bucket, parts, strict=True)]


def sum_bytes(tensors: Sequence[Tensor]) -> int:
    """What ``sum_into`` allocates at most; the tensors may be on ``meta``."""
    return max((_bytes(bucket) for bucket in buckets(tensors, BUCKET_BYTES)), default=0)


def buckets(tensors: Sequence[V], most_bytes: int) -> Iterator[list[V]]:
    """Tensors in order, grouped by device and dtype into at most ``most_bytes`` each (or one
    tensor)."""
    kinds: dict[tuple[torch.device, torch.dtype], list[V]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        bucket: list[V] = []
        for tensor in alike:
            if bucket and _bytes([*bucket, tensor]) > most_bytes:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _bytes(bucket: Sequence[Tensor]) -> int:
    """As it is summed."""
    return sum(tensor.numel() * wide_dtype(tensor.dtype).itemsize for tensor in bucket)


class _Pause:
    """Sleeps longer and longer, and looks around every ``_LOOK_S``."""

    def __init__(self, look: Callable[[], None], longest_s: float = 5e-3) -> None:
        self._longest_s = longest_s
        self._look, self._next, self._start = look, 1e-4, time.monotonic()
        self._looked = self._start

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __call__(self) -> None:
        time.sleep(self._next)
        self._next = min(self._longest_s, 1.5 * self._next)
        if (now := time.monotonic()) - self._looked >= _LOOK_S:
            self._looked = now
            self._look()


class _Lobby:
    """Where ranks wait for each other: the group's store.

    ``came`` counts arrivals, ``at/R`` those of rank R; ``failed`` holds what ended the run,
    ``ended`` is set by the primary; ``who/R`` says where rank R lives, ``beat/R`` that it does, and
    ``leaves/R`` that it has failed and comes to no other meeting.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._meets = store
        self._meetings = 0
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._home = f"{socket.gethostname()} {_pid_namespace()}"
        self._who: list[tuple[str, int]] = []
        self._over = threading.Event()
        store.set(f"who/{rank}", json.dumps([self._home, os.getpid()]))
        store.add(f"beat/{rank}", 1)
        threading.Thread(target=self._beat, name="ranks", daemon=True).start()
        self.meet()
        self._who = [json.loads(store.get(f"who/{other}")) for other in range(size)]

    def again(self) -> None:
        """Meetings begin anew, as if none had failed."""
        self._meets, self._meetings = dist.PrefixStore("again", self._store), 0

    def meet(self) -> float:
        """Waits until all ranks are here; the seconds it took."""
        self._meetings += 1
        pause = _Pause(self.look)
        with self._spoken():
            self._meets.add(f"at/{self._rank}", 1)
            came = self._meets.add("came", 1)
            while came < self._meetings * self._size:
                pause()
                if pause.seconds > PATIENCE_S:
                    self._lose_patience()
                came = self._meets.add("came", 0)
        return pause.seconds

    def _lose_patience(self) -> None:
        each = enumerate(self._meets.add(f"at/{rank}", 0) for rank in range(self._size))
        if late := [rank for rank, meetings in each if meetings < self._meetings]:
            self.close(late[0], f"it lives, and did not come within {PATIENCE_S:g} s")
        self.look()

    def look(self) -> None:
        with self._spoken():
            if not self._meets.check(["failed"]):
                ranks = range(len(self._who))
                gone = next((r for r in ranks if self._is_gone(r) or self._has_left(r)), None)
                if gone is None:
                    return
                lost = "" if gone else "; what it had not saved is lost"
                self.close(gone, f"its process is gone (killed, or crashed){lost}", dead=True)
            rank, told, dead = json.loads(self._meets.get("failed"))
            lives = next(r for r in range(self._size) if r == self._rank or not self._is_gone(r))
        raise RankError(f"rank {rank} of {self._size}: {told}", lives if dead else 0)

    def close(self, rank: int, told: str, *, dead: bool = False) -> None:
        """No further meeting; the first reason is kept."""
        with suppress(RuntimeError):  # the store went with its host
            self._meets.compare_set("failed", "", json.dumps([rank, told, dead]))

    def leave(self, *, failed: bool = False) -> None:
        """Returns when the primary has done all it had to do; that then waits for the others for a
        moment, as it may be the store's host."""
        self._over.set()
        pause, others = _Pause(lambda: None), range(1, self._size)
        with suppress(RuntimeError):
            if failed:
                self._store.set(f"leaves/{self._rank}", "")
            if self._rank:
                while not self._store.check(["ended"]) and not self._is_gone(0):
                    pause()
                self._store.set(f"left/{self._rank}", "")
                return
            self._store.set("ended", "")
            while pause.seconds < _BEAT_S and not all(
                self._store.check([f"left/{rank}"]) or self._is_gone(rank) for rank in others
            ):
                pause()

    def _is_gone(self, rank: int) -> bool:
        home, pid = self._who[rank]
        if rank == self._rank:
            return False
        if home == self._home and not _lives(pid):
            return True
        beat, now = self._store.get(f"beat/{rank}"), time.monotonic()
        known, since = self._beats.setdefault(rank, (beat, now))
        if beat != known:
            self._beats[rank] = beat, now
            return False
        return now - since > SILENT_S

    def _has_left(self, rank: int) -> bool:
        """Whether a rank will not come although meetings began anew."""
        return self._meets is not self._store and bool(self._store.check([f"leaves/{rank}"]))

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store went with its host
            while not self._over.wait(_BEAT_S):
                self._store.add(f"beat/{self._rank}", 1)

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        """The store's own errors: its host is rank 0, or torchrun on the first node."""
        try:
            yield
        except dist.DistError as error:
            raise RankError(
                f"rank 0 of {self._size}, or torchrun on its host, is gone; what it had not saved "
                f"is lost ({error})".splitlines()[0],
                min(1, self._rank),
            ) from error


def _pid_namespace() -> str:
    """Processes see each other by number within one."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
