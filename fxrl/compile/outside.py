"""Memory and time of a step outside of its layers: weights, embeddings, last norm, head and loss,
and what a loss computes between two forwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from fxrl.analysis.saved_tensors import read_later
from fxrl.analysis.stretches import Stretch
from fxrl.compile.bodies.figures import Figures
from fxrl.compile.region_costs import Profiles, call_cost, eager_seconds, of_call, off_meta
from fxrl.ir.graph import (
    EMBEDDING,
    HOST_ROWS,
    base_of,
    bound,
    inputs_of,
    is_loss_head,
    is_tensor,
    is_view,
    needs_grad,
    readers_of,
    shape_of,
    val_of,
)
from fxrl.ir.region import Region, region_at
from fxrl.kernels.hopper import plan as head_plan
from fxrl.ops.linear_logprob.arguments import made_in_forward
from fxrl.ops.linear_logprob.kept import PICKED_BYTES, kept_itemsize
from fxrl.ops.piecewise_head import online_bytes
from fxrl.ops.sharded import WIDENED, Layout
from fxrl.passes.fuse_linear_logprob import differentiated_outputs
from fxrl.planner.chain import Option
from fxrl.planner.cost import brought_bytes
from fxrl.planner.eager_profile import CallCost, profile
from fxrl.planner.memory_profile import nbytes
from fxrl.planner.schedule import Measure, SharedWeight, shared_weight, volume
from fxrl.planner.target import Target

_ADAM_STATES = 2
#: What cuBLAS holds for its products.
_LIBRARIES = 64 * 2**20
#: Bytes that a loss head's tiles take (``kernels.hopper.plan``), and those of a tiled backward.
_HEAD_SCRATCH = 200 * 2**20
_HEAD_BACKWARD_SCRATCH = 256 * 2**20
#: Of the GPUs that have the CUDA route of the loss head; others' tiles are no larger.
_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Between:
    """What is computed between two forwards."""

    nodes: Sequence[fx.Node]
    option: Option  # what it costs


class Outside:
    """The costs of all that is outside of the layers: weights, embeddings, last norm, head, loss.

    ``runs`` are the layers' ops, one run for each forward; ``holding`` are the weights that have a
    gradient already; the optimizer's states are split among ``state_shards`` ranks; ``keeping`` are
    the loss heads that keep their exponentials.

    Attributes:
        ahead, behind: the ops ahead of the first run, and behind the last.
        between: what is behind each other run; None if that costs nothing.
        base_bytes: alive during the whole step.
        held_bytes: of these, gradients that exist when the step begins.
        table_bytes: of these, frozen embeddings, which could be in host memory.
        looked_up_seconds: what reading them from there would take.
        head_bytes: the most that is allocated between the last layer's forward and its backward.
        seconds: of all ops.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        runs: Sequence[Stretch],
        profiles: Profiles,
        target: Target,
        measure: Measure,
        holding: frozenset[fx.Node],
        state_shards: int,
        keeping: frozenset[fx.Node],
    ) -> None:
        self._runs, self._profiles, self._target, self._measure = runs, profiles, target, measure
        ops = [node for node in gm.graph.nodes if node.op == "call_function"]
        self.ahead, *between, self.behind = parts = _around(ops, runs)
        tensors = [node for node in inputs_of(gm.graph) if is_tensor(node)]
        weights = [node for node in tensors if not _is_table(node, HOST_ROWS)]
        trained = [node for node in weights if needs_grad(node)]
        states = _ADAM_STATES * self._bytes(trained) // state_shards
        shared = self._bytes(self._shared(self.ahead)) + self._buffers(ops)
        self.held_bytes = self._bytes(holding)
        tables = [node for node in weights if _is_table(node)]
        self.table_bytes = self._bytes(tables)
        self.looked_up_seconds = sum(self._bytes(one.users) for one in tables) / target.link
        self.base_bytes = self._bytes(weights) + states + shared + _LIBRARIES + self.held_bytes
        self._between_runs = [(part, parts[n + 2 :]) for n, part in enumerate(between)]
        # What only the head reads: its gradient is added at once to one that is there.
        readers = {weight: {*filter(needs_grad, weight.users)} for weight in holding}
        added = [weight for weight, ops in readers.items() if ops and ops <= {*self.behind}]
        self._added_bytes = self._bytes(added)
        self._nodes = [node for part in parts for node in part]
        self._eager_seconds = eager_seconds(self._nodes, measure, target)
        self._keep(keeping)

    def keeping(self, heads: frozenset[fx.Node]) -> Outside:
        """The same where these heads keep their exponentials."""
        other = copy(self)
        other._keep(heads)
        return other

    def _keep(self, heads: frozenset[fx.Node]) -> None:
        self._keeping = heads
        self.between = [self._between(*part) for part in self._between_runs]
        headed = profile(self.behind, self._measure, self._cost).peak_bytes
        self.head_bytes = headed + self._added_bytes
        self.seconds = self._eager_seconds + sum(map(self._seconds, self._nodes))

    def _bytes(self, nodes: Iterable[fx.Node]) -> int:
        return sum(nbytes(node, self._measure) for node in nodes)

    def _buffers(self, ops: Iterable[fx.Node]) -> int:
        """Two of the largest piece of the weights that ranks have parts of (``ops.sharded``)."""
        read = {found for op in ops for found in _shared_weights(op)}
        pieces = [
            Layout(one.rows, one.dtype, one.format).piece_bytes(one.row_bytes(self._measure))
            for one in read
        ]
        return 2 * max(pieces, default=0)

    def _shared(self, ahead: Sequence[fx.Node]) -> set[fx.Node]:
        """Values kept until the backward that belong to no layer: those that several layers or the
        ops behind them read, and those that the derivatives of the ops ahead read."""
        shared = {base_of(value) for node in ahead for value in read_later(node)}
        for run in self._runs:
            read = {base_of(arg) for node in run.nodes for arg in node.all_input_nodes}
            shared |= read - run.given - {*run.nodes}
        return {node for node in shared if node.op == "call_function"}

    def _between(
        self, ops: Sequence[fx.Node], later: Sequence[Sequence[fx.Node]]
    ) -> Between | None:
        """The memory for ops between two forwards; ``later`` are those behind later forwards, which
        may read what these compute. Their time is counted in ``seconds``."""
        found = profile(ops, self._measure, self._cost)
        costs = {node: self._cost(node) for node in ops}
        saved = {
            base_of(value)
            for node, cost in costs.items()
            for value in (read_later(node) if cost is None else cost.reads_later)
        }
        behind = {node for part in later for node in part}
        own = (node for node in ops if is_tensor(node) and not is_view(node) and node not in saved)
        read = [node for node in own if not behind.isdisjoint(readers_of(node))]
        kept = found.kept_bytes + self._bytes(read)
        graded = {arg for node in filter(needs_grad, ops) for arg in node.all_input_nodes}
        weights = {arg for arg in graded if arg.op == "placeholder" and needs_grad(arg)}
        backward = found.backward_bytes + self._bytes(weights)
        if not any((found.forward_bytes, kept, backward)):
            return None
        option = Option(None, kept, 0, 0.0, 0.0, found.forward_bytes, backward, takes_turn=False)
        return Between(ops, option)

    def _cost(self, node: fx.Node) -> CallCost | None:
        """The cost of a head or of another region that is no layer; None for ATen ops."""
        if is_loss_head(node):
            return self._head_cost(node)
        if (region := region_at(node)) is None:
            return None
        return call_cost(node, self._figures(node, region), self._measure)

    def _head_cost(self, node: fx.Node) -> CallCost:
        """A head that makes its gradient in the forward keeps, for each output, a gradient as large
        as the hidden states. Another head keeps the hidden states, and its exponentials if told."""
        given, wanted = bound(node), differentiated_outputs(node)
        hidden = given["hidden"]
        piece = 0 if given.get("weight_scale") is None else WIDENED
        if _made_in_forward(node):
            *rows, width = map(self._measure, shape_of(hidden))
            sums = online_bytes(prod(rows), width, val_of(hidden).dtype) if "vocab" in given else 0
            scratch = _HEAD_SCRATCH + piece + sums
            return CallCost((), len(wanted) * self._bytes([hidden]), scratch, 0)
        sums = 4 * self._measure(volume(val_of(hidden)))
        if node in self._keeping:
            sizes = (self._measure(shape_of(given[name])[0]) for name in ("hidden", "weight"))
            kept = prod(sizes) * kept_itemsize(val_of(hidden).dtype)
            scratch = self._bytes([hidden]) + sums + PICKED_BYTES
            return CallCost((hidden,), kept, _HEAD_SCRATCH, scratch)
        backward = self._gradient_scratch(node) + sums + piece
        return CallCost((hidden,), 0, _HEAD_SCRATCH + piece, backward)

    def _gradient_scratch(self, node: fx.Node) -> int:
        """Scratch of a trained head's backward: the rows that count, gathered; a tile of the
        logits' gradient; and, if there are several tiles, the sum of the weight's gradient over
        them."""
        given, measure = bound(node), self._measure
        if not needs_grad(given["weight"]):
            return _HEAD_BACKWARD_SCRATCH
        *sizes, width = map(measure, shape_of(given["hidden"]))
        entries, rows = measure(shape_of(given["weight"])[0]), prod(sizes)
        tile = head_plan.for_gradient(rows, width, entries, _MULTIPROCESSORS)
        sums = 4 * tile.vocab * width if tile.rows < rows else 0
        return nbytes(given["hidden"], measure) + 2 * min(rows, tile.rows) * tile.vocab + sums

    def _figures(self, node: fx.Node, region: Region) -> Figures:
        inputs: Any = node.args[0]
        tile: Any = node.args[2]
        values = [arg.meta["val"] for arg in inputs]
        profiled = self._profiles(off_meta(region))
        return of_call(node, profiled.at(values, self._measure, self._target, tile))

    def _seconds(self, node: fx.Node) -> float:
        """Seconds of a loss head or of another region that is no layer.

        For N rows, width H and V entries, each product of a head takes 2 N H V FLOPs: the logits,
        the gradient of the rows (with the logits once more unless the forward makes it), and the
        weight's gradient.
        """
        if (region := region_at(node)) is not None:
            figures = self._figures(node, region)
            return figures.forward_s + figures.backward_s
        measure, target = self._measure, self._target
        if str(node.target) == HOST_ROWS:
            return self._bytes([node]) / target.link
        brought = brought_bytes(node, measure) / target.peer_link
        if not is_loss_head(node):
            return brought
        given = bound(node)
        *rows, width = map(measure, shape_of(given["hidden"]))
        entries = measure(given.get("vocab") or shape_of(given["weight"])[0]) * width
        products = reads = 1
        if differentiated_outputs(node):
            again = not (_made_in_forward(node) or node in self._keeping)
            products, reads = 2 + again + needs_grad(given["weight"]), 1 + again
        return max(2 * products * prod(rows) * entries / target.product_flops, reads * brought)


def _around(ops: Sequence[fx.Node], runs: Sequence[Stretch]) -> list[Sequence[fx.Node]]:
    """The ops ahead of the first run, behind each run, and so behind the last."""
    if not runs:
        return [(), ops]
    place = {node: index for index, node in enumerate(ops)}
    ends = [0, *(place[run.nodes[-1]] + 1 for run in runs)]
    begins = [*(place[run.nodes[0]] for run in runs), len(ops)]
    return [ops[end:begin] for end, begin in zip(ends, begins, strict=True)]


def _shared_weights(op: fx.Node) -> Iterator[SharedWeight]:
    """The sharded weights that an op reads, or that the body of a region's call reads."""
    region, given = region_at(op), {}
    if region is not None:
        inputs: Any = op.args[0]
        given = dict(zip(inputs_of(region.forward.graph), inputs, strict=True))
    for node in [op] if region is None else region.forward.graph.nodes:
        if (found := shared_weight(node)) is not None:
            yield found._replace(part=given.get(found.part, found.part))


def _is_table(weight: fx.Node, lookup: str = EMBEDDING) -> bool:
    """Whether a weight is frozen, and read only by lookups of this kind."""
    found = {str(user.target) == lookup and _table(user) is weight for user in weight.users}
    return found == {True} and not needs_grad(weight)


def _table(lookup: fx.Node) -> Any:
    return lookup.args[1 if str(lookup.target) == HOST_ROWS else 0]


def _made_in_forward(head: fx.Node) -> bool:
    """Whether a loss head's forward makes its gradients, too."""
    given = bound(head)
    trained = needs_grad(given["weight"]) or needs_grad(given["bias"])
    return made_in_forward(trained, differentiated_outputs(head))
