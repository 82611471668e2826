"""The plan of a captured step: its layers as a chain of options, the fastest that fits.

Called when heads and layers are regions and nothing has acted on them yet. Bodies are traced for
each cut, not compiled: what a layer needs and how long it takes is read off its graphs
(``planner``). Where everything may be kept, nothing else is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from operator import getitem
from typing import Any
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from fxrl.analysis.saved_tensors import read_later
from fxrl.analysis.stretches import Stretch, stretches_of
from fxrl.compile.bodies.figures import BodyProfile, Figures
from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.variants import CompiledRegion, build_region
from fxrl.errors import PlanError
from fxrl.ir.graph import (
    base_of,
    bound,
    clone,
    hint,
    is_call,
    is_loss_head,
    is_tensor,
    is_view,
    memory_like,
    needs_grad,
    shape_of,
    val_of,
)
from fxrl.ir.plan import Choice, CutLayer, Plan
from fxrl.ir.region import Region, region_at
from fxrl.ir.remark import format_bytes
from fxrl.ir.sizes import measure_by
from fxrl.kernels.hopper import plan as head_plan
from fxrl.ops.host_memory import PAGE
from fxrl.ops.linear_logprob.arguments import DIFFERENTIABLE, MADE_IN_FORWARD, parse_outputs
from fxrl.ops.piecewise_head import WIDENED
from fxrl.ops.sharded import piece_bytes
from fxrl.passes.offload import own_inputs
from fxrl.passes.recompute import OutlinedLayer, outlined_layers
from fxrl.passes.tile_tokens import tile_widest
from fxrl.planner.budget import Budget
from fxrl.planner.chain import Chain, Option, host_bytes, moments, peak_bytes
from fxrl.planner.cost import brought_bytes
from fxrl.planner.eager_profile import CallCost, profile
from fxrl.planner.memory_profile import nbytes
from fxrl.planner.pace import paced, step_seconds
from fxrl.planner.schedule import Measure, shared_weight, volume
from fxrl.planner.solver import fastest, least_peak
from fxrl.planner.target import Target

#: What may be chosen for a layer, tiles apart. The first is the fastest.
CUTS = (
    CutLayer("products"),
    CutLayer("fewest"),
    CutLayer("fewest", "host"),
    CutLayer("fewest", "gpu", "host"),
    CutLayer("fewest", "host", "host"),
    CutLayer("attention"),
    CutLayer("attention", "host"),
    CutLayer("attention", "gpu", "host"),
    CutLayer("attention", "host", "host"),
    CutLayer("inputs"),
    CutLayer("inputs", "host"),
)
#: Rows per tile that are tried; 0 for none. Smaller tiles leave a product too little to do: 2048
#: rows cost 5 ms a layer of Qwen3-8B's shape on an H200.
TILES = (0, 4096)
_ADAM_STATES = 2
_EAGER_PASSES = 6  # over each value: written and read, forward and backward, and its gradient
#: What cuBLAS holds for its products.
_LIBRARIES = 64 * 2**20
#: What a loss head's tiles take (``kernels.hopper.plan``), and those of a backward that has any.
_HEAD_SCRATCH = 200 * 2**20
_HEAD_BACKWARD_SCRATCH = 256 * 2**20
#: Of the GPUs that have the CUDA route of the loss head; others' tiles are no larger.
_MULTIPROCESSORS = 132
_MOST = 2**24  # tokens, or rows; nobody asks for more
_GUESSES = 12

#: A region's body as kernels; traced when it is first asked for.
Profiles = Callable[[Region], BodyProfile]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a plan depends on of a batch, and of the moment it comes.

    Attributes:
        sizes: symbols of the outer graph, and what they are; () for those it was captured with.
        held: places of the graph's inputs that are weights and have a gradient of an earlier
            backward: of another micro-batch, or one that was set to zeros.
    """

    sizes: tuple[tuple[Any, int], ...] = ()
    held: frozenset[int] = frozenset()

    def within(self, other: Batch) -> bool:
        """Whether what is enough for the other is enough for this one."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return all(size <= most for (_, size), (_, most) in pairs) and self.held <= other.held


@dataclass(frozen=True)
class Planner:
    """Chooses for the layers of a captured graph."""

    profiles: Profiles  # of regions' bodies
    target: Target  # what the GPU can do
    budget: Budget  # what may be used of GPU and host
    with_context: bool = False  # find the longest context, too
    # As if every weight that is trained had a gradient of another micro-batch.
    accumulated: bool = False

    def __call__(self, gm: fx.GraphModule, plan: Plan, batch: Batch | None = None) -> Plan:
        """The plan with a choice for every layer, and what is predicted of the step.

        Args:
            batch: that is not the one the graph was captured with.

        Raises:
            PlanError: nothing fits the budget that the user gave.
        """
        return self.planned(self.step(gm, plan, batch))

    def planned(self, step: StepChain) -> Plan:
        """The same, of a step as a chain."""
        best = step.fastest(self.budget)
        if best is None:
            if self.budget.given:
                raise PlanError(self.too_large(step))
            best, _ = step.smallest(self.budget.host_bytes)
        longest = step.longest(self.budget) if self.with_context else None
        return replace(_foretold(step, best), max_context=longest)

    def foretold(self, gm: fx.GraphModule, plan: Plan, batch: Batch) -> Plan | None:
        """A plan that was made, with what is predicted of it for another batch; None where it does
        not fit the budget."""
        step = self.step(gm, plan, batch)
        given = (plan.choices[layer.name] for layer in step.layers)
        pairs = zip(step.chain().layers, given, strict=True)
        options = [replace(o, choice=c) for (o,), c in pairs if isinstance(c, CutLayer)]
        found = _foretold(step, options)
        assert found.peak_gpu_bytes is not None
        if found.peak_gpu_bytes > self.budget.gpu_bytes:
            return None
        return None if host_bytes(options) > self.budget.host_bytes else found

    def step(self, gm: fx.GraphModule, plan: Plan, batch: Batch | None = None) -> StepChain:
        """A captured graph as a chain, for its batch or for another."""
        batch = batch or Batch()
        values = {symbol: sympy.Integer(size) for symbol, size in batch.sizes}
        held = frozenset(_trained(gm)) if self.accumulated else batch.held
        shards = self.budget.state_shards
        return StepChain(gm, plan, self.profiles, self.target, values, held, shards)

    def too_large(self, step: StepChain) -> str:
        """Why no plan fits: what is largest, and what would fit."""
        best, needed = step.smallest(self.budget.host_bytes)
        top = max(moments(step.chain_of(best), best), key=lambda moment: moment.bytes)
        largest = max(top.parts, key=lambda part: top.parts[part])
        longest = step.longest(self.budget)
        cure = f"{longest} tokens would fit" if longest else "no length fits"
        return (
            f"no plan fits gpu_memory: this batch needs {format_bytes(needed)} at least, "
            f"and {format_bytes(self.budget.gpu_bytes)} may be used; most of it, in {top.where}, "
            f"is {largest}: {format_bytes(top.parts[largest])}; {cure}"
        )


@dataclass(frozen=True)
class StepChain:
    """A captured graph as a chain, at the sizes of its batch or at others."""

    gm: fx.GraphModule
    plan: Plan
    profiles: Profiles
    target: Target
    # Symbols of the outer graph that have another size than in the batch.
    values: Mapping[Any, int] = field(default_factory=dict)
    held: frozenset[int] = frozenset()  # see ``Batch``
    state_shards: int = 1  # ranks that share out the optimizer's states

    @cached_property
    def layers(self) -> list[OutlinedLayer]:
        """Those that the plan cuts, in order."""
        return [layer for layer in outlined_layers(self.gm) if not layer.inside]

    @cached_property
    def measure(self) -> Measure:
        """What sizes of the outer graph are."""
        return measure_by({**self._batch, **self.values})

    @cached_property
    def _batch(self) -> dict[Any, Any]:
        """What the symbols of the graph's inputs are in the batch."""
        inputs = [node.meta.get("val") for node in self.gm.graph.find_nodes(op="placeholder")]
        found = symbols_of(self.gm).items()
        return {symbol: sympy.Integer(hint(read(inputs))) for symbol, read in found}

    @cached_property
    def _alike(self) -> dict[str, OutlinedLayer]:
        """For each layer the one that stands for it: equal, but for gradients that nobody wants
        (the first layer's of its input), which makes little difference."""
        groups: dict[Any, list[OutlinedLayer]] = {}
        for layer in self.layers:
            key = tuple(call.meta["region"].id_without_grads for call in layer.calls)
            groups.setdefault(key, []).append(layer)
        return {layer.name: max(group, key=_wanted) for group in groups.values() for layer in group}

    @cached_property
    def stretches(self) -> dict[str, tuple[Stretch, ...]]:
        """The ops of each layer, one stretch for each forward in which it runs."""
        found: dict[str, tuple[Stretch, ...]] = {}
        for stretch in stretches_of(self.gm, {layer.name for layer in self.layers}):
            found[stretch.layer] = (*found.get(stretch.layer, ()), stretch)
        return found

    # -- solving
    def fastest(self, budget: Budget) -> tuple[Option, ...] | None:
        """The fastest options that fit: products kept everywhere, where these do."""
        gpu, host = budget.gpu_bytes, budget.host_bytes
        chain, plain = self.plain()
        if host_bytes(plain) <= host and (kept := paced(chain, plain, gpu)) is not None:
            return kept
        return fastest(self.chain(), gpu, host)

    def plain(self) -> tuple[Chain, tuple[Option, ...]]:
        """Products kept everywhere, or what the user's plan says: nothing is faster."""
        first = [self._options(layer, CUTS[:1], TILES[:1]) for layer in self.layers]
        return self.chain(first), tuple(option for (option,) in first)

    def smallest(self, host: int) -> tuple[tuple[Option, ...], int]:
        """The options with the least peak, and the budget that they need."""
        return least_peak(self.chain(), host)

    # -- other sizes
    def longest(self, budget: Budget) -> int | None:
        """Tokens of the longest context that some plan fits, to a percent; None where sizes do not
        vary, or nothing fits."""
        return self._most(-1, lambda tokens: self.at(tokens=tokens), budget)

    def most_rows(self, budget: Budget) -> int | None:
        """How many sequences some plan fits, likewise."""
        return self._most(0, lambda rows: self.at(rows=rows), budget)

    def at(self, *, rows: int | None = None, tokens: int | None = None) -> StepChain:
        """The same step at other sizes; what is no number of rows grows with the tokens.

        Args:
            rows, tokens: of the batch; None, or one that does not vary, stays.
        """
        row, length = self._symbol(0), self._symbol(-1)
        values = dict(self.values)
        if tokens is not None and length is not None:
            before = max(2, int(self._batch.get(length, 0)))
            grown = {s: n * tokens // before for s, n in self._batch.items() if s != row}
            values |= {s: sympy.Integer(max(2, n)) for s, n in grown.items()}
            values[length] = sympy.Integer(tokens)
        if rows is not None and row is not None:
            values[row] = sympy.Integer(rows)
        return replace(self, values=values)

    def size(self, dim: int) -> int | None:
        """Rows (dim 0) or tokens (dim -1) of the batch; None where they do not vary."""
        symbol = self._symbol(dim)
        return None if symbol is None else self.measure(symbol)

    def _most(self, dim: int, at: Callable[[int], StepChain], budget: Budget) -> int | None:
        if (now := self.size(dim)) is None:
            return None

        def needed(size: int) -> int:
            return at(size).smallest(budget.host_bytes)[1]

        return largest(needed, budget.gpu_bytes, now) or None

    def _symbol(self, dim: int) -> Any:
        """The symbol that is a dim of the largest input of token ids, [rows, tokens] or [tokens];
        None where it does not vary."""
        inputs = [n.meta.get("val") for n in self.gm.graph.find_nodes(op="placeholder")]
        ids = [v for v in inputs if isinstance(v, torch.Tensor) and v.dtype == torch.int64]
        ids = [v for v in ids if v.dim() > 0 and isinstance(v.shape[-1], torch.SymInt)]
        found = max(ids, key=lambda v: self.measure(volume(v)), default=None)
        if found is None or (dim == 0 and found.dim() == 1):
            return None
        size = found.shape[dim]
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
        return min(symbols, key=str, default=None)

    # -- the chain
    def chain(self, layers: Sequence[Sequence[Option]] | None = None) -> Chain:
        """All layers with these options, or with all that there are."""
        if layers is None:
            layers = [self._options(layer) for layer in self.layers]
        outer = self._outer
        ahead, behind = outer.gradients
        return Chain(
            tuple(map(tuple, layers)),
            outer.base_bytes,
            outer.head_bytes,
            outer.seconds,
            self.target.link,
            (ahead, *map(self._gradients, self.layers), behind),
            outer.held_bytes,
        )

    def chain_of(self, options: Sequence[Option]) -> Chain:
        """Each layer with the one option that was chosen."""
        return self.chain([[option] for option in options])

    @cached_property
    def _outer(self) -> _Outer:
        return _Outer(self)

    @cached_property
    def _known(self) -> dict[Any, list[Option]]:
        return {}

    def _options(
        self,
        layer: OutlinedLayer,
        cuts: Sequence[CutLayer] = CUTS,
        tiles: Sequence[int] = TILES,
    ) -> list[Option]:
        """What may be done with a layer: what the plan says, or one of these."""
        given = self.plan.choices.get(layer.name)
        layer = self._alike[layer.name]
        ids = tuple(call.meta["region"].id for call in layer.calls)
        if isinstance(given, CutLayer):
            given = replace(given, sending=None, fetching=None)  # which are the planner's
        if (key := (ids, str(given), len(cuts))) not in self._known:
            rows = prod(map(self.measure, shape_of(_hidden(layer))[:-1]))
            choices = [replace(cut, tile_tokens=t) for t in tiles if t < rows for cut in cuts]
            choices = [given] if isinstance(given, CutLayer) else choices
            found = (self._option(layer, choice) for choice in choices)
            self._known[key] = [option for option in found if option is not None]
        return self._known[key]

    def _option(self, layer: OutlinedLayer, choice: CutLayer) -> Option | None:
        """What a choice costs; None where the layer cannot do it."""
        regions = [as_chosen(call.meta["region"], choice) for call in layer.calls]
        if not any(regions):
            return None
        host = 0
        costs: dict[fx.Node, CallCost] = {}
        bodies: list[Figures] = []
        for call, region in zip(layer.calls, regions, strict=True):
            inputs: Any = call.args[0]
            values = [node.meta["val"] for node in inputs]
            chosen = region or as_chosen(call.meta["region"], replace(choice, tile_tokens=0))
            assert chosen is not None
            found = self.profiles(chosen).at(values, self.measure, self.target)
            costs[call] = _cost(call, found, self.measure)
            host += _away(call, found, own_inputs(call, layer.calls), choice)
            bodies.append(found)
        runs = self.stretches[layer.name]
        parts = [profile(run.nodes, self.measure, costs.get, run.given) for run in runs]
        seconds = sum(_eager_seconds(run.nodes, self.measure, self.target) for run in runs)
        return Option(
            choice,
            sum(part.kept_bytes for part in parts) - host,
            -(-host // PAGE) * PAGE,
            sum(body.forward_s for body in bodies) + seconds / 3,
            sum(body.backward_s for body in bodies) + seconds * 2 / 3,
            max(part.forward_bytes for part in parts),
            max(part.backward_bytes for part in parts),
        )

    def _gradients(self, layer: OutlinedLayer) -> int:
        """Bytes of the gradients of a layer's weights that are there when it has made them."""
        runs = self.stretches[layer.name]
        inputs = {arg for run in runs for node in run.nodes for arg in node.all_input_nodes}
        weights = (n for n in inputs if n.op in ("placeholder", "get_attr") and needs_grad(n))
        return sum(nbytes(node, self.measure) for node in weights if node not in self.holding)

    @cached_property
    def holding(self) -> frozenset[fx.Node]:
        """The weights that have a gradient."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        return frozenset(inputs[place] for place in self.held)


def largest(need: Callable[[int], int], limit: int, start: int) -> int:
    """The largest number, to a percent, that needs no more than a limit; 0 where none does.

    What is needed is nearly a line, so the next guess is where the line through the two last ones
    meets the limit; but never closer than a percent to a number that is known already.

    Args:
        start: where to begin.
    """
    low, high = 0, _MOST
    points: list[tuple[int, int]] = []
    guess = max(1, start // 2)
    for _ in range(_GUESSES):
        points.append((guess, need(guess)))
        low, high = (guess, high) if points[-1][1] <= limit else (low, guess)
        if high - low <= max(1, low // 100):
            break
        guess = _meets(points[-2:], limit) if len(points) > 1 else start
        guess = min(max(guess, low + max(1, low // 100)), high - max(1, high // 101))
    return low


def _meets(points: Sequence[tuple[int, int]], level: int) -> int:
    """Where the line through two points is at a level; twice as far out where it is flat."""
    (n, peak), (m, other) = points
    if (other - peak) * (m - n) <= 0:
        return 2 * max(n, m)
    return m + (level - other) * (m - n) // (other - peak)


def _foretold(step: StepChain, options: Sequence[Option]) -> Plan:
    """A step's plan with these options, and what is predicted of it."""
    chain = step.chain_of(options)
    pairs = zip(step.layers, options, strict=True)
    chosen: dict[str, Choice] = {layer.name: option.choice for layer, option in pairs}
    return replace(
        step.plan,
        choices={**step.plan.choices, **chosen},
        peak_gpu_bytes=peak_bytes(chain, options),
        peak_host_bytes=host_bytes(options),
        step_seconds=round(step_seconds(chain, options), 4),
        timeline=tuple(moments(chain, options)),
    )


def batches_of(gm: fx.GraphModule) -> Callable[..., Batch]:
    """Reads what a plan depends on off the arguments of a call of a graph; a second argument makes
    numbers of sizes."""
    symbols, trained = symbols_of(gm), _trained(gm)

    def read(args: Sequence[Any], number: Callable[[Any], int] = int) -> Batch:
        sizes = tuple((symbol, number(size(args))) for symbol, size in symbols.items())
        held = (n for n in trained if args[n].is_leaf and args[n].grad is not None)
        return Batch(sizes, frozenset(held))

    return read


def _trained(gm: fx.GraphModule) -> list[int]:
    """Places of the graph's inputs that get gradients."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if needs_grad(node)]


def symbols_of(gm: fx.GraphModule) -> dict[Any, Callable[[Sequence[Any]], Any]]:
    """The symbols of a graph's inputs, and how each is read off the arguments."""
    found: dict[Any, Callable[[Sequence[Any]], Any]] = {}
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else (value,)):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                of_tensor = isinstance(value, torch.Tensor)
                found[size.node.expr] = partial(_size, place, dim if of_tensor else None)
    return found


def _size(place: int, dim: int | None, args: Sequence[Any]) -> Any:
    return args[place] if dim is None else args[place].shape[dim]


def known_profiles(
    options: InductorOptions | None, plan: Plan, seen: Mapping[str, float] | None = None
) -> Profiles:
    """Profiles of bodies as they will be compiled, each made once.

    Args:
        seen: what is known of computed masks (``compile.mask_shares``).

    Bodies on ``meta`` are traced as a CPU's: only there does attention stay a kernel.
    """
    known: dict[str, BodyProfile] = {}
    of_body: dict[str, CompiledRegion] = {}

    def profile(region: Region) -> BodyProfile:
        if region.id not in known:
            body = replace(region, cut="inputs").id
            built = build_region(region, options, plan, of_body.get(body))
            of_body.setdefault(body, built)
            known[region.id] = BodyProfile(built, seen)
        return known[region.id]

    return profile


def as_chosen(region: Region, choice: CutLayer) -> Region | None:
    """The region that the passes will make of one; None where it has nothing to tile."""
    cut = replace(_off_meta(region), cut=choice.kept)
    return tile_widest(cut, choice.tile_tokens) if choice.tile_tokens else cut


#: Graphs and fake tensors on ``meta``, and the same on a CPU.
_MOVED: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()
_TWINS: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def _off_meta(region: Region) -> Region:
    """A region on ``meta`` as a CPU's, on which attention stays a kernel when it is traced."""
    if not any(spec.example.is_meta for spec in region.inputs):
        return region
    if region.forward not in _MOVED:
        moved = clone(region.forward)
        for node in moved.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        _MOVED[region.forward] = moved
    specs = tuple(replace(spec, example=_on_cpu(spec.example)) for spec in region.inputs)
    return replace(region, forward=_MOVED[region.forward], inputs=specs)


def _on_cpu(fake: Any) -> torch.Tensor:
    if fake not in _TWINS:
        with fake.fake_mode:
            _TWINS[fake] = memory_like(fake, device="cpu")
    return _TWINS[fake]


def _cost(call: fx.Node, figures: Figures, measure: Measure) -> CallCost:
    """What a region's call takes, results and gradients of their own apart."""
    inputs: Any = call.args[0]
    results = {user.args[1]: user for user in call.users if is_call(user, getitem)}
    of_kind: dict[str, dict[Any, fx.Node]] = {"input": dict(enumerate(inputs)), "output": results}
    read = [(of_kind.get(kind, {}).get(place), size) for (kind, place), size in figures.saved]
    made = sum(nbytes(result, measure) for result in results.values())
    kept = sum(size for value, size in read if value is None)
    graded = {*filter(needs_grad, inputs), *filter(needs_grad, results.values())}
    return CallCost(
        tuple(value for value, _ in read if value is not None),
        kept,
        max(0, figures.forward_bytes - made - kept),
        max(0, figures.backward_bytes - sum(nbytes(value, measure) for value in graded)),
    )


def _away(call: fx.Node, figures: Figures, own: Sequence[int], choice: CutLayer) -> int:
    """Bytes of what a region keeps that wait on the host.

    Its own outputs are the next layer's inputs, and what several layers read is no layer's.
    """
    count, host = len(call.meta["val"]), 0
    for (kind, place), size in figures.saved:
        if kind == "output" and place >= count:
            host += size if choice.kept_on == "host" else 0
        elif kind == "input" and place in own:
            host += size if choice.inputs_on == "host" else 0
    return host


def _eager_seconds(nodes: Iterable[fx.Node], measure: Measure, target: Target) -> float:
    """Of ops that run one by one, forward and backward."""
    values = [n for n in nodes if is_tensor(n) and not is_view(n) and n.target is not getitem]
    return _EAGER_PASSES * sum(nbytes(n, measure) for n in values) / target.bandwidth


def _read_by(values: Iterable[fx.Node], ops: Iterable[fx.Node]) -> list[fx.Node]:
    readers = {*ops}
    return [value for value in values if not readers.isdisjoint(value.users)]


def _wanted(layer: OutlinedLayer) -> int:
    """How many gradients a layer computes."""
    return sum(spec.needs_grad for call in layer.calls for spec in call.meta["region"].inputs)


def _hidden(layer: OutlinedLayer) -> fx.Node:
    """The hidden states that a layer gets."""
    inputs: Any = layer.calls[0].args[0]
    made: list[fx.Node] = [node for node in inputs if node.op == "call_function"] or inputs[:1]
    return max(made, key=lambda node: (needs_grad(node), val_of(node).dim()))


class _Outer:
    """What is outside of the layers: weights, embeddings, the last norm, head and loss.

    Attributes:
        base_bytes: alive from the step's begin to its end.
        head_bytes: allocated at most between the last layer's forward and its backward.
        gradients: bytes of the gradients of weights ahead of the layers, and of those behind; where
            a weight has a gradient, the new one is added to it.
        held_bytes: of gradients that are there from the begin.
        seconds: of all of it.
    """

    def __init__(self, step: StepChain) -> None:
        self._step = step
        graph, runs = step.gm.graph, [run for runs in step.stretches.values() for run in runs]
        inside = {node for run in runs for node in run.nodes}
        ops = [node for node in graph.nodes if node.op == "call_function"]
        begin = next((place for place, node in enumerate(ops) if node in inside), 0)
        end = max((place + 1 for place, node in enumerate(ops) if node in inside), default=0)
        outside = [node for node in ops if node not in inside]
        ahead, behind = ops[:begin], ops[end:]
        between = [node for node in ops[begin:end] if node not in inside]
        weights = [node for node in graph.find_nodes(op="placeholder") if is_tensor(node)]
        trained = [node for node in weights if needs_grad(node)]
        states = _ADAM_STATES * self._bytes(trained) // step.state_shards
        shared = self._bytes(self._shared(ahead)) + self._buffers(ops)
        shared += profile(between, step.measure, self._cost).kept_bytes
        self.held_bytes = self._bytes(step.holding)
        self.base_bytes = self._bytes(weights) + states + shared + _LIBRARIES + self.held_bytes
        headed = {*_read_by(trained, behind)}
        self.gradients = self._bytes(_read_by(trained, ahead)), self._bytes(headed - step.holding)
        self.head_bytes = profile(behind, step.measure, self._cost).peak_bytes
        self.head_bytes += self._bytes(headed & step.holding)
        eager = _eager_seconds(outside, step.measure, step.target)
        self.seconds = eager + sum(map(self._seconds, outside))

    def _bytes(self, nodes: Iterable[fx.Node]) -> int:
        return sum(nbytes(node, self._step.measure) for node in nodes)

    def _buffers(self, ops: Iterable[fx.Node]) -> int:
        """Two of the largest piece of the weights that ranks have parts of (``ops.sharded``)."""
        bodies = {region.forward for op in ops if (region := region_at(op)) is not None}
        inside = (node for body in bodies for node in body.graph.nodes)
        read = [found for node in (*ops, *inside) if (found := shared_weight(node)) is not None]
        sizes = ((rows, self._step.measure(shape_of(part)[1])) for part, rows in read)
        return 2 * max((piece_bytes(*size) for size in sizes), default=0)

    def _shared(self, ahead: Sequence[fx.Node]) -> set[fx.Node]:
        """What stays until the backward and is no layer's: what several layers read, or the ops
        behind them, and what derivatives of the ops ahead do."""
        shared = {base_of(value) for node in ahead for value in read_later(node)}
        for run in (run for runs in self._step.stretches.values() for run in runs):
            read = {base_of(arg) for node in run.nodes for arg in node.all_input_nodes}
            shared |= read - run.given - {*run.nodes}
        return {node for node in shared if node.op == "call_function"}

    def _cost(self, node: fx.Node) -> CallCost | None:
        """A head's, or that of another region that is no layer; None for ATen ops."""
        if is_loss_head(node):
            return self._head_cost(node)
        if (region := region_at(node)) is None:
            return None
        return _cost(node, self._figures(node, region), self._step.measure)

    def _head_cost(self, node: fx.Node) -> CallCost:
        """A head whose gradient is made in the forward keeps a vector of the size of the hidden
        states for each output; another one keeps the states themselves."""
        given, wanted = bound(node), _differentiated(node)
        hidden = given["hidden"]
        if _made_in_forward(node):
            return CallCost((), len(wanted) * self._bytes([hidden]), _HEAD_SCRATCH, 0)
        piece = 0 if given.get("weight_scale") is None else WIDENED
        sums = 4 * self._step.measure(volume(val_of(hidden)))
        backward = self._gradient_scratch(node) + sums + piece
        return CallCost((hidden,), 0, _HEAD_SCRATCH + piece, backward)

    def _gradient_scratch(self, node: fx.Node) -> int:
        """Of a trained head a tile of the logits' gradient, and where that is not all rows the sums
        over them of the weight's."""
        given, measure = bound(node), self._step.measure
        if not needs_grad(given["weight"]):
            return _HEAD_BACKWARD_SCRATCH
        *sizes, width = map(measure, shape_of(given["hidden"]))
        entries, rows = measure(shape_of(given["weight"])[0]), prod(sizes)
        tile = head_plan.for_gradient(rows, width, entries, _MULTIPROCESSORS)
        sums = 4 * tile.vocab * width if tile.rows < rows else 0
        return 2 * min(rows, tile.rows) * tile.vocab + sums

    def _figures(self, node: fx.Node, region: Region) -> Figures:
        inputs: Any = node.args[0]
        tile: Any = node.args[2]
        step, values = self._step, [arg.meta["val"] for arg in inputs]
        return step.profiles(_off_meta(region)).at(values, step.measure, step.target, tile)

    def _seconds(self, node: fx.Node) -> float:
        """Of a head, N rows, H wide, V entries, or of another region.

        A head's products take 2 N H V FLOPs each: the logits, and the gradient of the rows; where
        that is not made in the forward, the logits once more; and the weight's gradient.
        """
        if (region := region_at(node)) is not None:
            figures = self._figures(node, region)
            return figures.forward_s + figures.backward_s
        measure, target = self._step.measure, self._step.target
        brought = brought_bytes(node, measure) / target.peer_link
        if not is_loss_head(node):
            return brought
        given = bound(node)
        *rows, width = map(measure, shape_of(given["hidden"]))
        entries = measure(given.get("vocab") or shape_of(given["weight"])[0]) * width
        products = reads = 1
        if _differentiated(node):
            again = not _made_in_forward(node)
            products, reads = 2 + again + needs_grad(given["weight"]), 1 + again
        return max(2 * products * prod(rows) * entries / target.product_flops, reads * brought)


def _differentiated(head: fx.Node) -> set[str]:
    """The outputs of a loss head whose gradients are taken."""
    given = bound(head)
    if not any(map(needs_grad, head.all_input_nodes)):
        return set()
    names = given["outputs"] if given["grad_outputs"] is None else given["grad_outputs"]
    return {*parse_outputs(names)} & {*DIFFERENTIABLE}


def _made_in_forward(head: fx.Node) -> bool:
    """Whether a loss head's forward makes its gradients, too."""
    given = bound(head)
    if "vocab" in given:  # one that is read in pieces makes none
        return False
    frozen = not needs_grad(given["weight"]) and not needs_grad(given["bias"])
    return frozen and _differentiated(head) <= {*MADE_IN_FORWARD}
