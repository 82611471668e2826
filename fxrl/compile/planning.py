"""The plan of a captured step: its layers as a chain of options, the fastest that fits.

Called when heads and layers are regions and nothing has acted on them yet. Bodies are traced for
each cut, not compiled: what a layer needs and how long it takes is read off its graphs
(``planner``). Where everything may be kept, nothing else is traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch import fx

from fxrl.analysis.head_groups import kv_heads
from fxrl.analysis.stretches import Stretch, stretches_of
from fxrl.compile.bodies.figures import Figures
from fxrl.compile.outside import Between, Outside
from fxrl.compile.region_costs import (
    Profiles,
    as_chosen,
    as_profiled,
    away_bytes,
    call_cost,
    eager_seconds,
    handed,
    input_bytes,
    of_call,
)
from fxrl.errors import PlanError
from fxrl.ir.graph import hint, inputs_of, is_tensor, needs_grad, shape_of, val_of
from fxrl.ir.plan import Choice, CutHead, CutLayer, Plan, in_segment
from fxrl.ir.region import is_differentiated
from fxrl.ir.remark import format_bytes
from fxrl.ir.sizes import measure_by
from fxrl.ops.host_memory import PAGE
from fxrl.passes.keep_exponentials import trained_heads
from fxrl.passes.recompute import OutlinedLayer, maker_of_inputs, outlined_layers, own_inputs
from fxrl.planner.budget import Budget
from fxrl.planner.chain import Chain, Option, host_bytes, moments, peak_bytes
from fxrl.planner.eager_profile import CallCost, profile
from fxrl.planner.memory_profile import nbytes
from fxrl.planner.pace import paced, step_seconds
from fxrl.planner.schedule import Measure, volume
from fxrl.planner.solver import fastest, least_host_bytes, least_peak
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
#: Rows per tile that are tried. Smaller tiles leave a product too little to do: 2048 rows cost 5 ms
#: a layer of Qwen3-8B's shape on an H200.
TILE = 4096
#: What is tried with tiles and each KV head by itself: the fewest bytes, where nothing else fits.
GROUPED = (
    *(cut for cut in CUTS if cut.kept in ("attention", "inputs")),
    CutLayer("attention", "gpu", "again"),
    CutLayer("attention", "host", "again"),
)
#: What is tried beside, with the largest tiles, of layers in segments, and how many make one: more
#: keep less, and hold more while they run again.
SEGMENTED = (
    CutLayer("attention", "host", "host"),
    CutLayer("attention", "gpu", "again"),
    CutLayer("attention", "host", "again"),
)
SEGMENTS = (2, 4)
#: What each pass does of a choice; without it a layer has this instead.
UNDONE: Mapping[str, Mapping[str, Any]] = {
    "recompute": {"kept": "products"},
    "tile-tokens": {"tile_tokens": 0},
    "group-heads": {"head_groups": 0},
    "offload": {"inputs_on": "gpu", "kept_on": "gpu"},
}
_MOST = 2**24  # tokens, or rows; nobody asks for more
_GUESSES = 12


@dataclass(frozen=True, slots=True)
class Batch:
    """What a plan depends on: a batch's sizes, and which weights hold a gradient when it comes."""

    # Symbols of the outer graph and their values; () stands for the batch of the capture.
    sizes: tuple[tuple[Any, int], ...] = ()
    # Indices of the graph's inputs that are weights with a ``.grad`` already: of an earlier
    # micro-batch, or zeros.
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
    passes: frozenset[str] = frozenset(UNDONE)  # those that will act; nothing else is chosen

    def __call__(self, gm: fx.GraphModule, plan: Plan, batch: Batch | None = None) -> Plan:
        """The plan with a choice for every layer, and the predictions for the step; ``batch`` if it
        is not the one of the capture. Raises ``PlanError`` if nothing fits the budget that the user
        gave."""
        return self.step(gm, plan, batch).planned()

    def foretold(self, gm: fx.GraphModule, plan: Plan, batch: Batch) -> Plan | None:
        """A plan that was made, with what is predicted of it for another batch; None where it does
        not fit the budget."""
        step = self.step(gm, plan, batch)
        options = step.given()
        found = step.foretold(options)
        assert found.peak_gpu_bytes is not None
        if found.peak_gpu_bytes > self.budget.gpu_bytes:
            return None
        return None if host_bytes(options) > self.budget.host_bytes else found

    def step(self, gm: fx.GraphModule, plan: Plan, batch: Batch | None = None) -> StepChain:
        """A captured graph as a chain, for its batch or for another."""
        batch = batch or Batch()
        values = {symbol: sympy.Integer(size) for symbol, size in batch.sizes}
        held = frozenset(_trained(gm)) if self.accumulated else batch.held
        return StepChain(gm, plan, self, values, held)


@dataclass(frozen=True)
class StepChain:
    """A captured graph as a chain, at the sizes of its batch or at others."""

    gm: fx.GraphModule
    plan: Plan
    planner: Planner
    # Symbols of the outer graph that have another size than in the batch.
    values: Mapping[Any, int]
    held: frozenset[int]  # see ``Batch``

    @cached_property
    def layers(self) -> list[OutlinedLayer]:
        """The layers that the plan cuts, in order."""
        return [layer for layer in outlined_layers(self.gm) if not layer.inside]

    @cached_property
    def measure(self) -> Measure:
        """A function that evaluates the sizes of the outer graph."""
        return measure_by({**self._batch, **self.values})

    @cached_property
    def _batch(self) -> dict[Any, Any]:
        """The values that the symbols of the graph's inputs have in the batch."""
        inputs = [node.meta.get("val") for node in inputs_of(self.gm.graph)]
        found = symbols_of(self.gm).items()
        return {symbol: sympy.Integer(hint(read(inputs))) for symbol, read in found}

    @cached_property
    def _alike(self) -> dict[Stretch, Stretch]:
        """For each run of a layer, the one that represents it: of the same sizes, and equal except
        in which gradients are wanted (the first layer's input may need none), which makes little
        difference where any are."""
        groups: dict[Any, list[Stretch]] = {}
        for run in self.runs:
            key = tuple(call.meta["region"].id_without_grads for call in run.calls)
            groups.setdefault((key, _sizes(run), _grads(run) > 0), []).append(run)
        return {one: max(group, key=_grads) for group in groups.values() for one in group}

    @cached_property
    def runs(self) -> list[Stretch]:
        """The layers' ops, in each forward in which they run."""
        return [*stretches_of(self.gm, {layer.name for layer in self.layers})]

    @cached_property
    def places(self) -> list[Stretch | Between]:
        """What a chain is of: the runs of layers, and what is between them."""
        pairs = zip_longest(self.runs, self.outside.between)
        return [one for pair in pairs for one in pair if one is not None]

    # -- solving
    def planned(self) -> Plan:
        """See ``Planner``."""
        best = self.fastest()
        if best is None:
            if self.planner.budget.given:
                raise PlanError(self.too_large())
            best, _ = self.smallest()
        longest = self.longest() if self.planner.with_context else None
        return replace(self._with_heads(best), max_context=longest)

    def _with_heads(self, options: Sequence[Option]) -> Plan:
        """The plan with these options; heads keep their exponentials where that still fits."""
        off = {site for name, site in self.plan.switched_off if name == "keep-exponentials"}
        free = self.heads.keys() - self.plan.choices.keys() - off
        if free and "keep-exponentials" in self.planner.passes:
            outside = self.outside.keeping(self.keeping | {self.heads[site] for site in free})
            made = self.foretold(options, outside)
            if (made.peak_gpu_bytes or 0) <= self.planner.budget.gpu_bytes:
                heads = dict.fromkeys(sorted(free), CutHead("exponentials"))
                return replace(made, choices={**made.choices, **heads})
        return self.foretold(options)

    def foretold(self, options: Sequence[Option], outside: Outside | None = None) -> Plan:
        """The plan with these options, and what is predicted of it, also where the rest is
        ``outside``."""
        outside = outside or self.outside
        between = (part.option for part in outside.between if part is not None)
        options = [
            option if isinstance(place, Stretch) else next(between)
            for place, option in zip(self.places, options, strict=True)
        ]
        chain = self.chain_of(options, outside)
        pairs = zip(self.places, options, strict=True)
        chosen: dict[str, Choice] = {}
        for place, option in pairs:
            if not isinstance(place, Stretch) or option.choice is None:
                continue
            # a forward that is not differentiated keeps nothing, whatever its layers' choice
            if _grads(place) or place.layer not in chosen:
                chosen[place.layer] = option.choice
        return replace(
            self.plan,
            choices={**self.plan.choices, **chosen},
            peak_gpu_bytes=peak_bytes(chain, options),
            peak_host_bytes=host_bytes(options),
            step_seconds=round(step_seconds(chain, options), 4),
            timeline=tuple(moments(chain, options)),
        )

    def too_large(self) -> str:
        """Why no plan fits: what is largest, and what would fit."""
        best, needed = self.smallest()
        top = max(moments(self.chain_of(best), best), key=lambda moment: moment.bytes)
        largest = max(top.parts, key=lambda part: top.parts[part])
        longest = self.longest()
        cure = f"{longest} tokens would fit" if longest else "no length fits"
        return (
            f"no plan fits gpu_memory: this batch needs {format_bytes(needed)} at least, "
            f"and {format_bytes(self.planner.budget.gpu_bytes)} may be used; most of it, in "
            f"{top.where}, is {largest}: {format_bytes(top.parts[largest])}; {cure}"
        )

    def fastest(self) -> tuple[Option, ...] | None:
        """The fastest options that fit: products kept everywhere, where these do."""
        gpu, host = self.planner.budget.gpu_bytes, self.planner.budget.host_bytes
        chain, plain = self.plain()
        if host_bytes(plain) <= host and (kept := paced(chain, plain, gpu)) is not None:
            return kept
        return fastest(self.chain(), gpu, host)

    def plain(self) -> tuple[Chain, tuple[Option, ...]]:
        """Products kept everywhere, or what the user's plan says: nothing is faster."""
        first = [self._options(place, plain=True) for place in self.places]
        return self.chain(first), tuple(option for (option,) in first)

    def smallest(self) -> tuple[tuple[Option, ...], int]:
        """The options with the least peak, and the budget that they need."""
        return least_peak(self.chain(), self.planner.budget.host_bytes)

    # -- other sizes
    def longest(self) -> int | None:
        """Tokens of the longest context that some plan fits, to a percent; None where sizes do not
        vary, or nothing fits."""
        return self._most(-1, lambda tokens: self.at(tokens=tokens))

    def most_rows(self) -> int | None:
        """The largest number of sequences that some plan fits, to a percent; None as for
        ``longest``."""
        return self._most(0, lambda rows: self.at(rows=rows))

    def at(self, *, rows: int | None = None, tokens: int | None = None) -> StepChain:
        """The same step for another number of rows or tokens of the batch (None keeps it). Every
        symbol but those of rows grows with the tokens."""
        length, alike = self._symbol(-1), self._rows
        values = dict(self.values)
        if tokens is not None and length is not None:
            before = max(2, int(self._batch.get(length, 0)))
            grown = {s: n * tokens // before for s, n in self._batch.items() if s not in alike}
            values |= {s: sympy.Integer(max(2, n)) for s, n in grown.items()}
            values[length] = sympy.Integer(tokens)
        if rows is not None:
            values |= dict.fromkeys(alike, sympy.Integer(rows))
        return replace(self, values=values)

    def size(self, dim: int) -> int | None:
        """Rows (dim 0) or tokens (dim -1) of the batch; None where they do not vary."""
        symbol = self._symbol(dim)
        return None if symbol is None else self.measure(symbol)

    def _most(self, dim: int, at: Callable[[int], StepChain]) -> int | None:
        if (now := self.size(dim)) is None:
            return None
        budget = self.planner.budget

        def needed(size: int) -> int:
            step = at(size)
            asked = least_host_bytes(step.chain())  # of choices that are given
            if asked > budget.host_bytes:  # as far above the budget as the host's is above its own
                return budget.gpu_bytes * (asked + 1) // (budget.host_bytes + 1) + 1
            return step.smallest()[1]

        return largest(needed, budget.gpu_bytes, now) or None

    @cached_property
    def _rows(self) -> frozenset[Any]:
        """The symbols that are numbers of rows: what ``_symbol`` finds, and those that are as many
        and stand nowhere but in the first dim of inputs with several (chosen and rejected)."""
        if (row := self._symbol(0)) is None:
            return frozenset()
        shapes = [shape_of(node) for node in inputs_of(self.gm.graph) if is_tensor(node)]
        first = set().union(*(_symbols(shape[:1]) for shape in shapes if len(shape) > 1))
        others = set().union(*(_symbols(shape[len(shape) > 1 :]) for shape in shapes))
        count = self._batch.get(row)
        return frozenset({row} | {s for s in first - others if self._batch.get(s) == count})

    def _symbol(self, dim: int) -> Any:
        """The symbol that is a dim of the largest input of token ids, [rows, tokens] or [tokens];
        None where it does not vary."""
        inputs = [n.meta.get("val") for n in inputs_of(self.gm.graph)]
        ids = [v for v in inputs if isinstance(v, torch.Tensor) and v.dtype == torch.int64]
        ids = [v for v in ids if v.dim() > 0 and isinstance(v.shape[-1], torch.SymInt)]
        found = max(ids, key=lambda v: self.measure(volume(v)), default=None)
        if found is None or (dim == 0 and found.dim() == 1):
            return None
        return min(_symbols([found.shape[dim]]), key=str, default=None)

    # -- the chain
    def chain(
        self,
        layers: Sequence[Sequence[Option]] | None = None,
        outside: Outside | None = None,
    ) -> Chain:
        """The chain of all layers with these options; by default with all that are possible."""
        if layers is None:
            layers = [self._options(place) for place in self.places]
        outside = outside or self.outside
        return Chain(
            tuple(map(tuple, layers)),
            self._numbers,
            self._gradients,
            outside.base_bytes,
            outside.head_bytes,
            outside.seconds,
            self.planner.target.link,
            outside.held_bytes,
            self.planner.target.start,
        )

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        number = {layer.name: place for place, layer in enumerate(self.layers)}
        found: list[int] = []
        for place in self.places:
            found.append(number[place.layer] if isinstance(place, Stretch) else found[-1])
        return tuple(found)

    def given(self) -> list[Option]:
        """The option of each place, where a given plan has a choice for every layer."""
        found = []
        for place, (option, *_) in zip(self.places, self.chain().layers, strict=True):
            choice = None if isinstance(place, Between) else self.plan.choices[place.layer]
            assert choice is None or isinstance(choice, CutLayer), choice
            found.append(replace(option, choice=choice))
        return found

    def chain_of(self, options: Sequence[Option], outside: Outside | None = None) -> Chain:
        """The chain in which each layer has only the one option that was chosen."""
        return self.chain([[option] for option in options], outside)

    @cached_property
    def outside(self) -> Outside:
        """What is no layer."""
        planner, shards = self.planner, self.planner.budget.state_shards
        given = planner.profiles, planner.target, self.measure, self.holding, shards
        return Outside(self.gm, self.runs, *given, self.keeping)

    @cached_property
    def heads(self) -> dict[str, fx.Node]:
        """The loss heads that may keep their exponentials."""
        return {site.name: site.anchor for site in trained_heads(self.gm)}

    @property
    def keeping(self) -> frozenset[fx.Node]:
        """Those that do by the plan."""
        kept = CutHead("exponentials")
        found = self.heads.items()
        return frozenset(head for site, head in found if self.plan.choices.get(site) == kept)

    def _options(self, place: Stretch | Between, *, plain: bool = False) -> list[Option]:
        """The options of a layer in a forward: the one that a given plan names, else those that are
        possible, or with ``plain`` the first."""
        if isinstance(place, Between):
            return [place.option]
        if place in self._given:
            return [self._given[place]]
        choices = [
            replace(cut, tile_tokens=tile, head_groups=groups)
            for tile, groups in ([(0, 0)] if plain else self._parts(place))
            for cut in (GROUPED if groups else CUTS[: 1 if plain else None])
        ]
        behind = self._following.get(place)
        asked = behind in self._given and self._given[behind].reach > 0
        done = (choice for choice in choices if self._done(place, choice))
        found = [self._cost(place, choice, asked=asked) for choice in done]
        return [*filter(None, found), *([] if plain else self._segments[place])]

    def _parts(self, run: Stretch) -> list[tuple[int, int]]:
        """How a layer may run, as rows per tile and groups of heads, from most bytes to fewest:
        whole, the MLP in tiles, and with each KV head by itself too."""
        more, heads = list[tuple[int, int]](), self._heads[self._alike[run]]
        if prod(map(self.measure, shape_of(_hidden(self._alike[run]))[:-1])) > TILE:
            more = [(TILE, 0), (TILE, heads)] if heads > 1 else [(TILE, 0)]
        least = [(part, CutLayer("inputs", "gpu", "gpu", *part)) for part in more]
        return [(0, 0)] + [
            part
            for part, choice in least
            if self._done(run, choice) and self._cost(run, choice) is not None
        ]

    @cached_property
    def _heads(self) -> dict[Stretch, int]:
        """How many KV heads layers alike have; 0 where that is not known."""
        return {run: _kv_heads(run) for run in dict.fromkeys(self._alike.values())}

    def _done(self, run: Stretch, choice: CutLayer) -> bool:
        """Whether all that a choice says would be done to a layer."""
        return without(self._off(run), choice) == choice

    def _off(self, run: Stretch) -> set[str]:
        """The passes that do nothing to a layer."""
        off = {name for name, site in self.plan.switched_off if site == run.layer}
        return off | (UNDONE.keys() - self.planner.passes)

    def _cost(self, run: Stretch, choice: CutLayer, *, asked: bool = False) -> Option | None:
        """The costs of a choice for a layer, whose outputs are ``asked`` for again; None if the
        layer cannot do it."""
        key = (self._alike[run], choice, asked)
        if key not in self._known:
            self._known[key] = self._option(*key)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Stretch, CutLayer, bool], Option | None]:
        return {}

    def _option(self, run: Stretch, choice: CutLayer, asked: bool) -> Option | None:
        regions = as_chosen([call.meta["region"] for call in run.calls], choice, asked=asked)
        if regions is None:
            return None
        planner, host, dropped, hands, again = self.planner, 0, 0, 0, 0.0
        costs: dict[fx.Node, CallCost] = {}
        bodies: list[Figures] = []
        for call, region in zip(run.calls, regions, strict=True):
            inputs: Any = call.args[0]
            values = [node.meta["val"] for node in inputs]
            profiled = planner.profiles(as_profiled(region))
            found = of_call(call, profiled.at(values, self.measure, planner.target))
            if is_differentiated(call) and region.again == "forward":
                found, made = handed(found)
                hands += made
            again += found.again_s if region.again != "never" else 0.0
            costs[call] = call_cost(call, found, self.measure)
            host += away_bytes(call, found, own_inputs(call, run.calls), choice)
            if choice.inputs_on == "again":
                dropped += input_bytes(found, own_inputs(call, run.calls))
            bodies.append(found)
        part = profile(run.nodes, self.measure, costs.get, run.given)
        seconds = eager_seconds(run.nodes, self.measure, planner.target)
        return Option(
            choice,
            part.kept_bytes - host - dropped,
            -(-host // PAGE) * PAGE,
            sum(body.forward_s for body in bodies) + seconds / 3,
            sum(body.backward_s for body in bodies) + again + seconds * 2 / 3,
            part.forward_bytes,
            part.backward_bytes + dropped + hands,
            _grads(run) > 0,
            dropped + hands,
        )

    # -- segments
    @cached_property
    def _given(self) -> dict[Stretch, Option]:
        """The options of the layers that a given plan has a choice for. What of it cannot be done,
        tiles or groups of heads, stays in the choice: their passes say why."""
        choices: dict[Stretch, CutLayer] = {}
        for run in self.runs:
            given = self.plan.choices.get(run.layer)
            if isinstance(given, CutLayer):  # the pace is the planner's
                given = replace(given, sending=None, fetching=None)
                given = without(self._off(run), given)
                again = given.inputs_on == "again" and run not in self._after
                choices[run] = replace(given, inputs_on="gpu") if again else given
        found = self._in_segments(choices)
        whole = {
            run: replace(choices[run], tile_tokens=0, head_groups=0)
            for run, option in found.items()
            if option is None
        }
        if whole:
            found = self._in_segments({**choices, **whole})
        return {
            run: replace(option, choice=choices[run])
            for run, option in found.items()
            if option is not None
        }

    @cached_property
    def _segments(self) -> dict[Stretch, list[Option]]:
        """The options of layers in segments. A segment begins at each layer whose number its length
        divides, and at those whose input no layer makes again; what a plan gave stays outside."""
        found: dict[Stretch, list[Option]] = {run: [] for run in self.runs}
        trained = [run for run in self.runs if _grads(run) and run not in self._given]
        places = zip(self._numbers, self.places, strict=True)
        number = {place: n for n, place in places if isinstance(place, Stretch)}
        ahead = {run: before for before, run in self._following.items()}
        apart = {
            number[run] for run in trained if run not in self._after or ahead[run] in self._given
        }
        parts = {p: None for run in trained for p in self._parts(run)[1:] or [(0, 0)]}
        for count, cut, (tile, groups) in itertools.product(SEGMENTS, SEGMENTED, parts):
            way = replace(cut, tile_tokens=tile, head_groups=groups)
            begins = [number[run] % count == 0 or number[run] in apart for run in trained]
            pairs = zip(trained, begins, [*begins[1:], True], strict=True)
            choices = {run: in_segment(way, first=one, last=last) for run, one, last in pairs}
            # a forward that is not differentiated keeps nothing, whatever its layers' choice
            idle = in_segment(way, first=True, last=True)
            choices |= {run: idle for run in self.runs if not _grads(run)}
            choices = {run: choice for run, choice in choices.items() if self._done(run, choice)}
            for run, option in self._in_segments(choices).items():
                if option is not None:
                    found[run].append(replace(option, segments=(way, count)))
        return found

    @cached_property
    def _following(self) -> dict[Stretch, Stretch]:
        """The layer behind each."""
        return dict(itertools.pairwise(self.runs))

    @cached_property
    def _after(self) -> frozenset[Stretch]:
        """The layers whose inputs the layer before can make again, both being one region."""

        def makes(before: Stretch, run: Stretch) -> bool:
            whole = len(before.calls) == len(run.calls) == 1
            return whole and maker_of_inputs(run.calls[0], run.calls) is before.calls[0]

        return frozenset(run for before, run in self._following.items() if makes(before, run))

    def _in_segments(self, choices: Mapping[Stretch, CutLayer]) -> dict[Stretch, Option | None]:
        """The options of layers with these choices, where some make the next one's input again and
        hand to its backward what was made on the way."""
        found: dict[Stretch, Option | None] = {}
        held = reach = 0
        for run, following in itertools.pairwise([*self.runs, None]):
            if run is None or (choice := choices.get(run)) is None:
                held = reach = 0
                continue
            behind = None if following is None else choices.get(following)
            asked = behind is not None and behind.inputs_on == "again"
            held, reach = (held, reach + 1) if choice.inputs_on == "again" else (0, 0)
            option = found[run] = self._cost(run, choice, asked=asked)
            if option is not None:
                held += option.handed_bytes
                least = option.backward_bytes - option.handed_bytes
                found[run] = replace(
                    option, backward_bytes=least + held, handed_bytes=held, reach=reach
                )
        return found

    @cached_property
    def _gradients(self) -> tuple[int, ...]:
        """Bytes of the gradients of weights that are there when each place has made its own (see
        ``Chain.gradients``): whoever reads a weight last makes its gradient first. It is added to
        one that is there when all who read the weight have had their turn."""
        parts = [self.outside.ahead, *(p.nodes for p in self.places), self.outside.behind]
        readers: dict[fx.Node, list[int]] = {}
        for place, nodes in enumerate(parts):
            for arg in {a for node in filter(needs_grad, nodes) for a in node.all_input_nodes}:
                if arg.op in ("placeholder", "get_attr") and needs_grad(arg):
                    readers.setdefault(arg, []).append(place)
        made = [0] * len(parts)
        for weight, found in readers.items():
            first, last = found[0], found[-1]
            size, held = nbytes(weight, self.measure), weight in self.holding
            if first < last or not held:
                made[last] += size
            if first == 0 and (first < last or held):  # the embeddings' own is the last moment's
                made[0] += size
            elif first < last and held:
                made[first] -= size
        return tuple(made)

    @cached_property
    def holding(self) -> frozenset[fx.Node]:
        """The weights that have a gradient."""
        inputs = inputs_of(self.gm.graph)
        return frozenset(inputs[place] for place in self.held)


def without(passes: Collection[str], choice: CutLayer) -> CutLayer:
    """What is left of a choice where these passes do nothing."""
    if not passes:
        return choice
    fields = {name: value for one in passes for name, value in UNDONE.get(one, {}).items()}
    for name in ("inputs_on", "kept_on"):
        if getattr(choice, name) == "again":  # which is not what moves to the host
            fields[name] = "gpu" if "recompute" in passes else "again"
    return replace(choice, **fields)


def largest(need: Callable[[int], int], limit: int, start: int) -> int:
    """The largest number whose need is within ``limit``, to a percent; 0 if there is none. The
    search begins at ``start``.

    The need is nearly linear, so the next guess is where the line through the last two meets the
    limit, but never closer than a percent to a number already tried.
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
    """Where the line through two points reaches a level; twice as far out if it is flat."""
    (n, peak), (m, other) = points
    if (other - peak) * (m - n) <= 0:
        return 2 * max(n, m)
    return m + (level - other) * (m - n) // (other - peak)


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
    inputs = inputs_of(gm.graph)
    return [place for place, node in enumerate(inputs) if needs_grad(node)]


def symbols_of(gm: fx.GraphModule) -> dict[Any, Callable[[Sequence[Any]], Any]]:
    """The symbols of a graph's inputs, and how each is read off the arguments."""
    found: dict[Any, Callable[[Sequence[Any]], Any]] = {}
    for place, node in enumerate(inputs_of(gm.graph)):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else (value,)):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                of_tensor = isinstance(value, torch.Tensor)
                found[size.node.expr] = partial(_size, place, dim if of_tensor else None)
    return found


def _size(place: int, dim: int | None, args: Sequence[Any]) -> Any:
    return args[place] if dim is None else args[place].shape[dim]


def _symbols(sizes: Sequence[Any]) -> set[Any]:
    """The symbols in these sizes."""
    return {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


def _grads(run: Stretch) -> int:
    """How many gradients a layer makes in a forward."""
    return sum(call.meta["region"].num_grads for call in filter(is_differentiated, run.calls))


def _sizes(run: Stretch) -> tuple[Any, ...]:
    """The sizes of what a layer gets that the batch decides."""
    inputs: list[Any] = [call.args[0] for call in run.calls]
    sizes: list[Any] = [n for given in inputs for node in given for n in shape_of(node)]
    return tuple(size.node.expr for size in sizes if isinstance(size, torch.SymInt))


def _kv_heads(run: Stretch) -> int:
    """How many heads of keys a layer's attention has; 0 where it is not known."""
    return max(kv_heads(call.meta["region"].forward.graph) for call in run.calls)


def _hidden(run: Stretch) -> fx.Node:
    """The hidden states that a layer gets."""
    inputs: Any = run.calls[0].args[0]
    made: list[fx.Node] = [node for node in inputs if node.op == "call_function"] or inputs[:1]
    return max(made, key=lambda node: (needs_grad(node), val_of(node).dim()))
