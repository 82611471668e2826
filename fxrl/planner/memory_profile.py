"""The bytes that a compiled body needs while it runs, by the kernels that it will run as.

A buffer lives from the kernel that writes it to the last that reads it. At that one its memory may
become the result's: where a generated kernel reads nothing else of it for another value. A product
whose result is a part of a concatenation writes there, so that part lives in the whole. Of a call
with several results each lives by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import (
    DEQUANTIZED_MM,
    SCALED_MM,
    bound,
    is_attention,
    is_call,
    is_exchange,
    is_tensor,
    library_weight,
    val_of,
)
from fxrl.ops import dequantized, sharded
from fxrl.planner.schedule import (
    Kernel,
    Measure,
    is_backward,
    owner,
    shared_weight,
    tensors,
    volume,
)

aten = torch.ops.aten

#: Bytes of an entry of a quantised weight while it is widened: in fp32 and in bf16 side by side.
_WIDENING = 4 + 2
Inside = Callable[[fx.Node], int]


@dataclass(slots=True)
class _Life:
    """The first and the last kernel between which a buffer is allocated."""

    first: int
    last: int


class MemoryProfile:
    """The allocations of a graph over time; sizes are filled in later."""

    def __init__(self, gm: fx.GraphModule, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels
        output = gm.graph.output_node()
        given = set(map(owner, output.all_input_nodes))
        self._whole = _parts_of_concatenations(kernels, given)
        self._lives: dict[fx.Node, _Life] = {}
        for place, kernel in enumerate(kernels):
            for node in map(self._buffer, kernel.makes):
                self._lives.setdefault(node, _Life(place, place))
            for node in map(self._buffer, (*kernel.makes, *kernel.reads)):
                if node in self._lives:
                    self._lives[node].last = place
        for node in map(self._buffer, given):
            if node in self._lives:
                self._lives[node].last = len(kernels)
        made = [node for kernel in kernels for node in kernel.makes]
        self._volumes = {node: _volumes(tensors(node)) for node in made}
        for node in made:
            if node in self._lives and isinstance(node.meta["val"], (list, tuple)):
                self._part(node, output)
        self._in_place = list(map(self._taken_over, range(len(kernels))))

    def _part(self, call: fx.Node, output: fx.Node) -> None:
        """Let each result of a call live for as long as it is read; what nobody reads, the call."""
        place_of = {node: place for place, k in enumerate(self._kernels) for node, _ in k.values}
        place_of |= {output: len(self._kernels)}
        life, results = self._lives[call], list(call.meta["val"])

        @cache
        def last(value: fx.Node) -> int:
            """The last kernel that reads a value, itself or by what is computed within kernels."""
            users = [user for user in value.users if user is output or tensors(user)]
            places = [place_of[u] if u in place_of else last(u) for u in users]
            return max(places, default=life.first)

        for item in call.users:
            if is_call(item, operator.getitem):
                at: Any = item.args[1]
                part, results[at] = results[at], None
                self._volumes[item] = _volumes([part] if isinstance(part, torch.Tensor) else [])
                self._lives[item] = _Life(life.first, last(item))
        rest = [value for value in results if isinstance(value, torch.Tensor)]
        self._volumes[call], self._lives[call] = _volumes(rest), _Life(life.first, life.first)

    def peak(self, measure: Measure, inside: Inside = lambda call: 0) -> int:
        """Peak bytes, results included; ``inside`` gives those that a called region allocates
        itself."""
        return max(self.timeline(measure, inside), default=0)

    def timeline(self, measure: Measure, inside: Inside = lambda call: 0) -> list[int]:
        """Bytes at each kernel."""
        bytes_of = {
            node: sum(width * measure(count) for count, width in self._volumes[node])
            for node in self._lives
        }
        alive = [0] * len(self._kernels)
        for node, life in self._lives.items():
            for place in range(life.first, min(life.last + 1, len(alive))):
                alive[place] += bytes_of[node]
        for place, taken in enumerate(self._in_place):
            alive[place] -= sum(bytes_of[node] for node in taken)
        waiting = self._waiting(alive, bytes_of)
        calls = (kernel.calls for kernel in self._kernels)
        within = [0 if c is None else workspace(c, measure) + inside(c) for c in calls]
        return [sum(parts) for parts in zip(alive, waiting, within, strict=True)]

    def _waiting(self, alive: Sequence[int], bytes_of: Mapping[fx.Node, int]) -> list[int]:
        """Bytes of dead buffers that stay allocated until a later buffer of the same size takes
        them over.

        Inductor keeps such memory where that does not raise the peak that it sees; it does not see
        the insides of the kernels that it calls.
        """
        total, peak = [0] * len(alive), max(alive, default=0)
        free: list[tuple[int, fx.Node]] = []
        for place, kernel in enumerate(self._kernels):
            for node in kernel.makes if not self._in_place[place] else ():
                for since, dead in reversed(free):
                    between = range(since + 1, place)
                    high = max((alive[i] for i in between), default=0)
                    if self._volumes[dead] == self._volumes[node] and bytes_of[dead] + high <= peak:
                        free.remove((since, dead))
                        for i in between:
                            total[i] += bytes_of[dead]
                        break
            ended = (n for n, life in self._lives.items() if life.last == place)
            free += [(place, n) for n in ended if n not in self._in_place[place]]
        return total

    def _buffer(self, node: fx.Node) -> fx.Node:
        return self._whole.get(node, node)

    def _taken_over(self, place: int) -> list[fx.Node]:
        """Buffers whose memory is reused for a result of this kernel."""
        kernel = self._kernels[place]
        taken: dict[fx.Node, None] = {}
        for made, reads in kernel.values if kernel.calls is None else ():
            for read in sorted(reads, key=str):
                life = self._lives.get(read)
                if read in taken or life is None or life.last != place or life.first == place:
                    continue
                alone = sum(read in others for _, others in kernel.values) == 1
                if alone and made in kernel.makes and self._volumes[read] == self._volumes[made]:
                    taken[read] = None
                    break
        return list(taken)


def _volumes(values: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
    return [(volume(value), value.element_size()) for value in values]


def tensor_bytes(value: torch.Tensor, measure: Measure) -> int:
    """Bytes of a tensor without gaps."""
    return value.element_size() * measure(volume(value))


def nbytes(node: fx.Node, measure: Measure) -> int:
    """Bytes of all tensors that a node returns."""
    return sum(tensor_bytes(value, measure) for value in tensors(node))


def workspace(call: fx.Node, measure: Measure) -> int:
    """Memory that a call allocates inside.

    An attention's backward: the query's gradient and its row sums in fp32, and if heads share keys
    the gradients of keys and values for each head; under a computed mask only the row sums. A
    product with an FP8 weight: the transposed weight, or a widened tile; a library's, whose inside
    is not known: the weight in the dtype of its rows. An exchange among ranks takes twice what it
    sends, its results included.
    """
    if is_exchange(call):
        return 2 * exchanged_bytes(call, measure) - nbytes(call, measure)
    if str(call.target) == DEQUANTIZED_MM:
        return _WIDENING * dequantized.TILE
    if (read := shared_weight(call)) is not None and read.format:
        return min(sharded.WIDENED, 4 * read.rows * read.row_bytes(measure))
    if str(call.target) == SCALED_MM:
        weight: Any = call.args[2]
        return nbytes(weight, measure) if call.args[4] else 0
    if library_weight(call) is not None:
        made, rows = val_of(call), val_of(call.all_input_nodes[0])
        return made.element_size() * measure(made.shape[-1]) * measure(rows.shape[-1])
    if not (is_attention(call) and is_backward(call)):
        return 0
    given = bound(call)
    query, key = val_of(given["query"]), val_of(given["key"])
    count = measure(volume(query))
    if "mask" in given:
        return 4 * count // measure(query.shape[-1])
    shared = 2 * query.element_size() * count if query.shape[1] != key.shape[1] else 0
    return 4 * count + 4 * count // measure(query.shape[-1]) + shared


def exchanged_bytes(call: fx.Node, measure: Measure) -> int:
    """Of the shared values, which are what an exchange takes or returns: as long as a rank's share
    is, times the ranks, and so no shorter than the other."""
    given: Any = call.args[0]
    return max(nbytes(call, measure), sum(nbytes(node, measure) for node in given))


def _parts_of_concatenations(
    kernels: Sequence[Kernel], given: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Products that write directly into the concatenation that reads them."""
    made = {node: kernel for kernel in kernels for node in kernel.makes}
    whole: dict[fx.Node, fx.Node] = {}
    for node in made:
        if is_call(node, aten.cat.default):
            for part in map(owner, node.all_input_nodes):
                writes = part in made and made[part].calls is not None
                if writes and part not in given and is_tensor(part):  # not a call with several
                    whole.setdefault(part, node)
    return whole
