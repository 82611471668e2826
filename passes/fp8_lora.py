"""Multiply by frozen weights in FP8; adapters stay in the model's dtype.

    %y = mm(%x, t(%w))                       %q, %s = fxrl.quantize_rows(%x)       once for all that
                                  becomes    %y     = fxrl.fp8_linear(%x, %q, %s,  read %x
                                                                      %w8, %scale)
    %a = mm(mm(%x, t(%A)), t(%B))            as it is: LoRA's own products

The weight is quantised when the step first runs, and again when it is written to: its values and
scales replace it as inputs of the graph. A weight that the model holds in FP8
(``fxrl.models.quantize``) is read as it is. Rows are quantised in every step. Products are found by
structure: rows times a 2-D input that takes no gradient, whatever module or adapter library made
it.

NOTE [Why after the outlining]: only then is each layer a site of its own, which may keep a weight
in bf16 that equal layers do not; layers that chose alike still share one body. And the plan is made
after this pass, from bodies with the bytes and products that will run; cuts, tiles and offloading
then act on these bodies as on any other.

NOTE [Why no product falls back because of what a step shows]: weights are judged before they are
used, but rows and gradients are known only when a step has run. A product that left FP8 then would
give other log-probs than those that were scored, and a resumed run would differ from one that went
on. So ``TrainStep.calibrate`` measures on a batch and returns the ``Config`` to use from the first
step on. Little is lost without it: on SmolLM2's weights 21 of 210 products are below a cosine of
0.999, all above 0.9986, 20 of them by the rows' gradient alone, for which ``wide_gradients`` is
enough; and in the whole model the layers' gradients have a median cosine of 0.951 with that
gradient in FP8 or not (bench/results/fp8_quality_smollm2_cpu.json).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, Self
from weakref import ref

import torch
from torch import Tensor, fx

import fxrl.ops.dequantized  # noqa: F401  # defines the op
from fxrl.analysis.rows.heads import factors, feeds_class_op
from fxrl.config import Config
from fxrl.ir.bodies import Lender, body_of, clone
from fxrl.ir.build import Builder
from fxrl.ir.derived import add_derived
from fxrl.ir.graph import (
    COPIES,
    MATRIX_PRODUCTS,
    SHARDED_MM,
    TRANSPOSES,
    add_input,
    hint,
    inputs_of,
    is_call,
    is_pointwise,
    is_same,
    is_tensor,
    is_view,
    needs_grad,
    reached,
    shape_of,
    tensor_val,
    val_of,
)
from fxrl.ir.graph_pass import SETTLED, Applied, Miss, Pass, PassDoc, Site, tidy
from fxrl.ir.plan import Choice, Keep, Plan, Rewrite
from fxrl.ir.region import InputSpec, Region, once_for, region_at, set_region
from fxrl.ir.remark import Refusal
from fxrl.ir.site import module_of, names_module, site_name
from fxrl.ops.fp8 import BLOCK, QuantizeWeight, Recipe, measured_seconds, scales_rows, why_no_fp8
from fxrl.ops.rounded import RoundedWeight

aten, ops = torch.ops.aten, torch.ops.fxrl

#: Calls that look at a weight and copy nothing.
_LOOKS = (
    *TRANSPOSES,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
#: What tensor cores ask of both sides of a weight.
_MULTIPLE = 16
#: A trained matrix that is this many times longer than wide is an adapter's factor, not a Linear.
_FACTOR = 8

#: The layer in a name: up to the outermost numbered module.
_LAYER = re.compile(r"^.*?\.\d+(?=[./])")
#: Calls that lead from the outermost graph to another: checkpointed bodies', then a region's.
Path = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class FrozenProduct(Site):
    """A product of rows with a 2-D input of the graph."""

    path: Path  # to the product's graph
    product: fx.Node  # the product
    named: str  # its name, in the layer that it is a part of
    # The input of the outermost graph that it multiplies by; None where that is in FP8 already.
    weight: fx.Node | None = None
    turned: bool = False  # the weight is [K, N], and no Linear's [N, K]

    @property
    def name(self) -> str:
        """The product's."""
        return self.named


@dataclass(frozen=True)
class Fp8Lora(Pass[FrozenProduct]):
    """Frozen Linears in FP8.

    Attributes:
        enabled: whether it was asked for.
        recipe: a weight's scales: one for each output ``"row"``, for each ``"block"`` of 128 x 128,
            or for the whole ``"tensor"``.
        gradient: what the rows' gradient is a product of: ``"fp8"``, or ``"bf16"`` (the model's
            dtype) with the weight widened a tile at a time; that always where scales are by block.
        wide_gradients: module paths, or parts of them, whose rows' gradient is as ``"bf16"`` says.
        skip: module paths, or parts of them, that stay; ``*`` stands for anything.
        heads: take what a softmax or a choice reads, too: a loss head, a router; or what a graph
            hands out as it is, to a loss behind a graph break or to the caller.
        least_values: entries of a weight below which it stays.
        error_limit: a weight's error in FP8 (``QuantizeWeight.error``) above which it stays. That
            of rounding alone is 0.026; more means that values under one scale lie far apart. With
            the rows' own 0.026, 0.036 makes a cosine of 0.999 of the product, and of its gradient,
            with those in bf16.
        error_of: (place among the graph's inputs, whether it is turned) -> that error; None of a
            weight that is not there.
        input_at: place among the graph's inputs -> the tensor; None of one that is not there.
        seconds_of: (``gradient``, rows, features in, features out) -> seconds of forward and
            backward in bf16 and in FP8; a product that is not faster stays.
        only_faster: whether it does; without, all that can be in FP8 are, such as to see what the
            rounding does to a small model.
        no_fp8: why the device has no products in FP8; empty where it has.
    """

    enabled: bool = field(default=True, metadata=SETTLED)
    recipe: Recipe = "row"
    gradient: Literal["fp8", "bf16"] = "fp8"
    wide_gradients: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    heads: bool = False
    least_values: int = 2**10
    only_faster: bool = True
    error_limit: float = 0.036
    error_of: Callable[[int, bool], float | None] | None = field(default=None, metadata=SETTLED)
    input_at: Callable[[int], Tensor | None] | None = field(default=None, metadata=SETTLED)
    seconds_of: Callable[[str, int, int, int], tuple[float, float]] | None = field(
        default=None, metadata=SETTLED
    )
    no_fp8: str = field(default="", metadata=SETTLED)

    name = "fp8-lora"
    doc = PassDoc(
        'with `precision="fp8"`: a product with a frozen 2-D weight, adapters beside it or not',
        "half the bytes of what its products read; a copy of the weight in FP8 is held beside it",
        "rounding of rows and weights to e4m3 (2.6 % each); one quantisation of the rows, whatever "
        "the number of products that read them",
        "the weight is trained, small, of odd sizes, or too wide in range for FP8; the GPU has no "
        "FP8, or is not faster with it",
    )

    @classmethod
    def of(cls, config: Config) -> Self:
        """Asked for by ``precision="fp8"``: to be among the passes that run changes no number."""
        return cls(config.precision == "fp8")

    def measured(self, inputs: Sequence[Any]) -> Self:
        """The pass with the rounding errors of these weights, and what their device can do."""
        if not self.enabled:
            return self
        held = _held(inputs)
        known = replace(self, input_at=held, error_of=_errors(held, self.recipe))
        devices = (x.device for x in inputs if isinstance(x, Tensor))
        device = next((one for one in devices if one.type not in ("cpu", "meta")), None)
        if device is None:
            return known
        return replace(
            known,
            seconds_of=partial(measured_seconds, device, self.recipe),
            no_fp8=why_no_fp8(device),
        )

    # -- where
    def match(self, gm: fx.GraphModule) -> Iterator[FrozenProduct | Miss]:
        for site in _products(gm) if self.enabled else ():
            if self.no_fp8:
                yield Miss(site.anchor, Refusal(f"every product stays as it is: {self.no_fp8}"))
                return
            if self.heads or not _is_head(site):
                yield site

    def planned(self, site: FrozenProduct, plan: Plan) -> Choice | None:
        """What it says; of a head it tells why others leave it, which is no reason here."""
        return None if _is_head(site) else plan.choices.get(site.name)

    # -- whether
    def decide(self, site: FrozenProduct) -> Choice:
        """Leave weights that are small, wide in range or no faster in FP8, and those that the user
        names."""
        if _illegal(site) is not None:
            return Rewrite(self.name)  # which says why
        features, out = _sizes(site)
        if (named := _naming(self.skip, site)) is not None:
            return Keep(f"stays as it is: skip names {named!r}", missed=False)
        if features * out < self.least_values:
            return Keep(f"too small: its weight has {features * out} entries")
        if (error := self._error(site)) is not None and not error <= self.error_limit:
            limit = f"above the limit of {self.error_limit}"
            return Keep(f"its weight in FP8 is off by {error:.3f}, {limit}")
        if self.only_faster and self.seconds_of is not None:
            rows = hint(shape_of(site.product)[0])
            plain, fp8 = self.seconds_of(self._gradient_of(site), rows, features, out)
            if fp8 >= plain:
                took = f"{fp8 * 1e3:.2f} ms against {plain * 1e3:.2f}"
                return Keep(f"no faster in FP8: {took}, for {rows} rows")
        return Rewrite(self.name)

    def _error(self, site: FrozenProduct) -> float | None:
        if site.weight is None or self.error_of is None:
            return None
        return self.error_of(_place(site.weight), site.turned)

    def _gradient_of(self, site: FrozenProduct) -> Literal["fp8", "bf16"]:
        return "bf16" if _naming(self.wide_gradients, site) is not None else self.gradient

    def _input(self, node: fx.Node) -> Tensor | None:
        return None if self.input_at is None else self.input_at(_place(node))

    # -- and how
    def rewrite(self, gm: fx.GraphModule, site: FrozenProduct, choice: Choice) -> Applied:
        if (refusal := _illegal(site)) is not None:
            raise refusal
        features, out = _sizes(site)
        weight: Sequence[fx.Node] = ()
        how = "as it is held"
        if site.weight is not None:
            weight = add_derived(gm, site.weight, QuantizeWeight(self.recipe, site.turned))
            error = "" if (off := self._error(site)) is None else f", off by {off:.3f}"
            how = f"scales by {self.recipe}{error}"
        gradient = self._gradient_of(site)
        if gradient != self.gradient:
            how = f"{how}; the gradient of its rows in the model's dtype"
        _swap_at(gm, site, weight, gradient)
        return Applied(f"weight [{out}, {features}] in FP8, {how}")

    # -- and how eager would
    def rounded(self, gm: fx.GraphModule) -> list[RoundedWeight]:
        """The weights that are multiplied in FP8, as the model has them."""
        found: dict[fx.Node, RoundedWeight] = {}
        products = (
            (path, node)
            for path, graph in _graphs(gm, (), tiles=True)
            for node in graph.find_nodes(op="call_function", target=ops.fp8_linear.default)
        )
        for path, node in products:
            weight, scale, gradient = (node.args[i] for i in (3, 4, 5))
            origin, _ = _outwards(weight, path)
            derived = origin.meta.get("derived")
            if derived is None:
                source, scales = self._input(origin), self._input(_outwards(scale, path)[0])
                held = None if source is None or scales is None else (source, scales)
            else:
                source = self.input_at(derived.place) if self.input_at is not None else None
                held = None if source is None else derived.make(source.detach())
            if source is not None and held is not None:
                turned = derived is not None and derived.make.turned
                site = _name(node, path)
                found[origin] = RoundedWeight(source, turned, *held, str(gradient), site)
        return [*found.values()]


# ---------------------------------------------------------------------------- what there is
def _is_head(site: FrozenProduct) -> bool:
    """Whether a product's values are scores: of classes, read by a softmax or a choice here, or
    handed out of the graph as they are, to a loss behind a graph break or the caller."""
    if feeds_class_op(site.product):
        return True
    seen = reached([site.product], lambda node: filter(_hands_on, node.users))
    return not site.path and any(user.op == "output" for node in seen for user in node.users)


def _hands_on(node: fx.Node) -> bool:
    """Whether a call passes on every value of its only tensor: laid out anew, cast or scaled."""
    if is_view(node) or is_call(node, *COPIES):
        return True
    return is_pointwise(node) and sum(map(is_tensor, node.all_input_nodes)) == 1


def _products(gm: fx.GraphModule) -> Iterator[FrozenProduct]:
    """Every product with a 2-D input but those of adapters, whose input is narrow and trained."""
    for path, graph in _graphs(gm, ()):
        for node in graph.nodes:
            anchor = path[-1] if path else node
            held = is_call(node, ops.dequantized_mm.default) and node.args[2:] == ("fp8", False)
            if held or str(node.target) == SHARDED_MM:
                yield FrozenProduct(anchor, 0, path, node, _name(node, path))
            if not is_call(node, *MATRIX_PRODUCTS):
                continue
            found = _weight(factors(node)[1], path)
            if found is not None and not (needs_grad(found[0]) and _is_factor(found[0])):
                yield FrozenProduct(anchor, 0, path, node, _name(node, path), *found)


def _graphs(
    gm: fx.GraphModule, path: Path, *, tiles: bool = False
) -> Iterator[tuple[Path, fx.Graph]]:
    """The graph, the bodies that it calls, and the layers' regions; all regions with ``tiles``."""
    yield path, gm.graph
    for call in gm.graph.nodes:
        inner, region = body_of(gm, call), region_at(call)
        if region is not None and (tiles or (region.layer and not region.tiled)):
            inner = region.forward
        if inner is not None:
            yield from _graphs(inner, (*path, call), tiles=tiles)


def _weight(right: fx.Node, path: Path) -> tuple[fx.Node, bool] | None:
    """The outermost graph's 2-D input that a right operand [K, N] is, and whether it lies so there.

    Views tell by their strides what they are of it, whatever they went through.
    """
    node, path = _outwards(right, path)
    while node.op != "placeholder":
        operand: Any = node.args[0] if is_call(node, *_LOOKS, *COPIES) else None
        if operand is None:
            return None
        if is_call(node, *COPIES) and val_of(operand).stride() != val_of(node).stride():
            return None
        node, path = _outwards(operand, path)
    val, seen = tensor_val(node), val_of(right)
    if val is None or val.dim() != 2 or not val.is_floating_point() or val.itemsize < 2:
        return None
    if not all(isinstance(size, int) for size in (*val.shape, *seen.shape)):
        return None
    layout = [(*zip(x.shape, x.stride(), strict=True),) for x in (val, seen)]
    if layout[0] == layout[1]:
        return node, True
    return (node, False) if layout[0] == layout[1][::-1] else None


def _inputs(call: fx.Node) -> list[Any]:
    """The inputs that a call hands to its body."""
    inputs: Any = call.args[0] if region_at(call) is not None else call.args[1:]
    return list(inputs)


def _is_factor(weight: fx.Node) -> bool:
    narrow, wide = sorted(map(hint, shape_of(weight)))
    return _FACTOR * narrow <= wide


def _name(product: fx.Node, path: Path) -> str:
    """A product's name; in a region, whose body layers share, as that of the layer that calls."""
    region = region_at(path[-1]) if path else None
    name = site_name(product)
    return name if region is None else _LAYER.sub(lambda _: region.layer, name, count=1)


def _naming(modules: Sequence[str], site: FrozenProduct) -> str | None:
    """The first of these paths, or parts of them, that names a product's module."""
    path = module_of(site.name)
    return next((one for one in modules if names_module(one, path)), None)


def _sizes(site: FrozenProduct) -> tuple[int, int]:
    """Features in, and out."""
    rows, _, _ = factors(site.product)
    return hint(shape_of(rows)[-1]), hint(shape_of(site.product)[-1])


def _illegal(site: FrozenProduct) -> Refusal | None:
    """Why a product cannot run in FP8."""
    features, out = _sizes(site)
    if str(site.product.target) == SHARDED_MM:
        why = "its weight is shared out over ranks, and a copy in FP8 would be whole on each"
        return Refusal(why, 'a model in FP8 takes half the memory: load it by quantization="fp8"')
    if needs_grad(site.weight):
        why = "its weight is trained: in FP8 it would be another one at every step"
        return Refusal(why, "freeze it and train adapters, such as fxrl.models.lora")
    if features % _MULTIPLE or out % _MULTIPLE:
        why = (
            f"its weight is [{out}, {features}], and products in FP8 take multiples of {_MULTIPLE}"
        )
        return Refusal(why)
    if site.product.kwargs:
        return Refusal("its addmm has alpha or beta")
    bodies = [call.args[0] for call in site.path if region_at(call) is None]
    if any(len(body.users) > 1 for body in bodies if isinstance(body, fx.Node)):
        return Refusal("its checkpointed body is shared with another call")
    return None


def _held(inputs: Sequence[Any]) -> Callable[[int], Tensor | None]:
    """A graph's real inputs by their place, for as long as somebody else holds them."""
    held = [ref(x) if isinstance(x, Tensor) else None for x in inputs]

    def input_at(place: int) -> Tensor | None:
        known = held[place] if place < len(held) else None
        found = None if known is None else known()
        real = found is not None and not found.is_meta and not hasattr(found, "fake_mode")
        return found if real else None

    return input_at


def _errors(
    input_at: Callable[[int], Tensor | None], recipe: Recipe
) -> Callable[[int, bool], float | None]:
    """Errors of weights, each measured when it is asked for."""

    @cache
    def error(place: int, turned: bool) -> float | None:
        weight = input_at(place)
        return None if weight is None else QuantizeWeight(recipe, turned).error(weight.detach())

    return error


def _place(node: fx.Node) -> int:
    """An input's place among those of its graph."""
    return inputs_of(node.graph).index(node)


def _outwards(node: Any, path: Path) -> tuple[fx.Node, Path]:
    """Follow an input outwards through the calls that hand it on, to what the caller gave first."""
    while path and node.op == "placeholder":
        node, path = _inputs(path[-1])[_place(node)], path[:-1]
    return node, path


# ---------------------------------------------------------------------------- what is done
def _swap_at(
    gm: fx.GraphModule, site: FrozenProduct, weight: Sequence[fx.Node], gradient: str
) -> None:
    """The product of a site, with a weight of the outermost graph; ``tidy`` afterwards."""
    region = next((call for call in site.path if region_at(call) is not None), None)
    lender, graph = Lender(gm), (site.product if region is None else region).graph
    weight = [lender.to(graph, part) for part in weight]
    if region is None:
        _swap(site.product, weight, gradient)
    else:
        _swap_inside(region, site.product.name, weight, gradient)


def _swap_inside(call: fx.Node, product: str, weight: Sequence[fx.Node], gradient: str) -> None:
    """A product of a region's body, for one call; the others' bodies stay."""
    region: Region = call.meta["region"]
    shapes = tuple(str(shape_of(part)) for part in weight)
    forward = _swapped(region.forward, product, gradient, shapes, weight=weight)
    kept = forward.meta["kept"]
    inputs = _inputs(call)
    specs = [InputSpec(val_of(w), False, False, alive=True) for w in weight]
    call.update_arg(0, [*(inputs[i] for i in kept), *weight])
    specs = [*(region.inputs[i] for i in kept), *specs]
    set_region(call, replace(region, forward=forward, inputs=tuple(specs)))


@once_for
def _swapped(
    forward: fx.GraphModule, product: str, gradient: str, _: Any, *, weight: Sequence[fx.Node]
) -> fx.GraphModule:
    """A copy of a body with a product swapped; ``meta["kept"]`` are the inputs that it has yet,
    behind which it takes the weight's values and scales."""
    gm = clone(forward)
    old = inputs_of(gm.graph)
    read = [bool(node.users) for node in old]
    more = [add_input(gm.graph, "fp8", val_of(part)) for part in weight]
    _swap(next(n for n in gm.graph.nodes if n.name == product), more, gradient)
    tidy(gm)
    gm.meta["kept"] = [i for i, node in enumerate(old) if node.users or not read[i]]
    for i in sorted(set(range(len(old))) - set(gm.meta["kept"])):
        gm.graph.erase_node(old[i])
    gm.recompile()
    return gm


def _swap(product: fx.Node, weight: Sequence[fx.Node], gradient: str) -> None:
    rows, _, bias = factors(product)
    held: Any = weight or product.args[1]
    by_block = not scales_rows(val_of(held[1]), val_of(held[0]))
    with Builder(product.graph).before(product) as build:
        values, scale = _quantized(build, rows, BLOCK if by_block else 0)
        by = "bf16" if by_block else gradient
        made = build.call(ops.fp8_linear.default, rows, values, scale, *held, by)
        made.meta = {**product.meta, "val": made.meta["val"]}
        if bias is not None:
            made = build.call(aten.add.Tensor, made, bias)
    product.replace_all_uses_with(made)
    product.graph.erase_node(product)


def _quantized(build: Builder, rows: fx.Node, block: int) -> tuple[fx.Node, fx.Node]:
    """Rows in FP8: those that another product of the same rows reads, or new ones."""
    for node in build.graph.find_nodes(op="call_function", target=ops.quantize_rows.default):
        if node.args[1] == block and is_same(node.args[0], rows):
            pair = node
            break
    else:
        pair = build.call(ops.quantize_rows.default, rows, block)
    parts = {user.args[1]: user for user in pair.users}
    values, scale = (parts.get(i) or build.call(operator.getitem, pair, i) for i in range(2))
    return values, scale
