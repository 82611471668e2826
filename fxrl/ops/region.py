"""The op behind every region: ``fxrl::region`` and its backward ``fxrl::region_vjp``.

The forward returns the region's outputs and, behind them, what its cut hands to the backward; the
graph sees the outputs alone. What runs is looked up by a key made of content and options. What
groups keep lies side by side in a new first dim; ``fxrl::region_again`` sums outputs of it again.

NOTE [Why an opaque op]: an autograd.Function that AOTAutograd inlines loses the saving under
Inductor, whose CSE merges the recomputed matmul with the forward's, and full-graph Inductor
batches unrolled tiles so that all are alive at once. Behind an op, tile count and token count are
run-time values, and one compiled body serves every shape.

NOTE [Why what is kept are outputs of the op]: an opaque op can only save what autograd sees, its
inputs and outputs. PyTorch's own fused ops (attention's log-sum-exp) do the same.

NOTE [Why keys and not objects]: an op's schema has no objects. ``_LIVE`` holds kernels weakly: they
belong to the captures that run them, and to the backward passes that still need them.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fxrl.ir.graph import Size, memory_like
from fxrl.ir.region import InputSpec, Region
from fxrl.ops import once_differentiable
from fxrl.ops.host_memory import can_wait, pool_of
from fxrl.ops.linear_logprob.op import linear_logprob_scale
from fxrl.ops.out_of_memory import join, with_room

TensorFunction = Callable[..., Sequence[Tensor]]
Strides = tuple[int, ...]
Source = tuple[str, int]


def read_of(sources: Sequence[Source]) -> list[Source]:
    """Those of a later part's sources that are inputs and outputs of the forward."""
    return [source for source in sources if source[0] in ("input", "output")]


@dataclass(frozen=True, slots=True)
class Later:
    """What runs behind a region's forward."""

    function: TensorFunction
    # Where each argument is from: ``("input", i)``, ``("output", i)`` (kept values count on),
    # ``("grad", i)`` or ``("size", i)``.
    sources: tuple[Source, ...]
    sizes: tuple[int, ...] = ()  # the integers among the arguments

    @property
    def read(self) -> list[Source]:
        """The sources that are inputs and outputs of the forward."""
        return read_of(self.sources)

    def __call__(self, kept: Sequence[Tensor], grads: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Run with the values that ``read`` names, in order."""
        queue = iter(kept)
        return self.function(
            *(
                grads[i] if kind == "grad" else self.sizes[i] if kind == "size" else next(queue)
                for kind, i in self.sources
            )
        )


@dataclass(frozen=True, slots=True)
class Body:
    """What runs for a region at one set of sizes."""

    forward: TensorFunction  # inputs -> outputs, then the values kept for the backward
    backward: Later | None  # -> gradients of the inputs that need one; None where none does
    num_outputs: int  # outputs of the region itself
    num_kept: int = 0  # values that it keeps
    again: Later | None = None  # -> outputs, of what groups keep; None where they keep nothing
    # Strides that the halves were traced for.
    inputs: tuple[Strides, ...] = ()
    grads: tuple[Strides, ...] = ()


class RegionKernels(ABC):
    """What the compiler made of a region, for all sizes."""

    key: str  # what the op knows it by
    region: Region  # the region itself
    num_outputs: int  # outputs of the region itself
    grad_outputs: tuple[int, ...]  # which outputs take an incoming gradient
    # The inputs and outputs that ``fxrl::region_again`` takes; None where groups keep nothing.
    again: tuple[Source, ...] | None = None
    min_rows: int = 1  # tiles of fewer rows are padded (a compiled body may assume at least 2)

    @property
    def makes_vectors(self) -> bool:
        """Whether the forward makes the gradients; see ``new_vectors``."""
        return self.region.cut == "vectors" and bool(self.grad_outputs)

    @abstractmethod
    def sizes_of(self, inputs: Sequence[Tensor]) -> tuple[Size, ...]:
        """What the region's sizes that vary are in these inputs."""

    @abstractmethod
    def body(self, sizes: Sequence[Size]) -> Body:
        """The body for these sizes; the first one where they are symbols themselves."""

    @abstractmethod
    def runs_again(self) -> bool:
        """Whether the backward that runs now may run once more (``retain_graph=True``)."""

    @abstractmethod
    def fake_outputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs and kept values on fake tensors."""

    @abstractmethod
    def fake_again(self, sizes: Sequence[Size], device: torch.device) -> list[Tensor]:
        """Outputs of ``fxrl::region_again``, on fake tensors."""

    @abstractmethod
    def fake_grads(self, sizes: Sequence[Size], device: torch.device) -> list[Tensor]:
        """Gradients of the inputs that need one, on fake tensors."""


_LIVE: WeakValueDictionary[str, RegionKernels] = WeakValueDictionary()


def register(kernels: RegionKernels) -> RegionKernels:
    """Make kernels callable by their key for as long as somebody holds what is returned.

    Equal content and options have one key: where it lives already, the living kernels are returned.
    """
    return _LIVE.setdefault(kernels.key, kernels)


def registered(key: str) -> RegionKernels | None:
    """The kernels under a key, if they live."""
    return _LIVE.get(key)


def lookup(key: str) -> RegionKernels:
    kernels = _LIVE.get(key)
    assert kernels is not None, f"region {key} was never built, or its capture is gone"
    return kernels


# ---------------------------------------------------------------------------- forward
@torch.library.custom_op(
    "fxrl::region",
    mutates_args=(),
    schema="(Tensor[] inputs, str key, SymInt tile, int[] host, int[] pace=[]) -> Tensor[]",
)
def region(
    inputs: list[Tensor], key: str, tile: int, host: Sequence[int], pace: Sequence[int] = ()
) -> list[Tensor]:
    """Run a region's forward, whole, in tiles of ``tile`` rows or in its groups; returns outputs,
    then kept values.

    Inputs in ``host`` wait in host memory for the backward; -1 stands for all kept values. ``pace``
    is ``sending`` and ``fetching`` of ``HostPool.store``, empty if not planned.
    """
    kernels = lookup(key)
    # Bodies already contain the casts that autocast asked for when they were captured.
    with torch.autocast(inputs[0].device.type, enabled=False):
        if kernels.region.tiled:
            return _forward_by_tiles(kernels, inputs, int(tile))
        body = kernels.body(kernels.sizes_of(inputs))
        if kernels.region.groups > 1:
            return _forward_by_groups(kernels.region, body, inputs)
        given = [_as_traced(x, strides) for x, strides in zip(inputs, body.inputs, strict=True)]
        return fresh(list(body.forward(*given)), inputs)


@region.register_fake
def _(
    inputs: list[Tensor], key: str, tile: int, host: Sequence[int], pace: Sequence[int] = ()
) -> list[Tensor]:
    return [*map(memory_like, lookup(key).fake_outputs(inputs))]


def fresh(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no storage with the inputs or each other, as an op must return."""
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    result = []
    for output in outputs:
        pointer = output.untyped_storage().data_ptr()
        shared = pointer in seen and output.numel()
        # in the same layout, as the op says: a clone of a slice would have another
        result.append(memory_like(output).copy_(output) if shared else output)
        seen.add(result[-1].untyped_storage().data_ptr())
    return result


def _as_traced(x: Tensor, strides: Strides) -> Tensor:
    """``x`` with the strides that the body was traced for; attention kernels differ in theirs."""
    if x.stride() == strides:
        return x
    pairs = zip(x.shape, x.stride(), strides, strict=True)
    if not any(n > 1 and have != want for n, have, want in pairs):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


# ---------------------------------------------------------------------------- backward
@torch.library.custom_op(
    "fxrl::region_vjp",
    mutates_args=(),
    schema="(Tensor[] kept, Tensor[] grads, SymInt[] sizes, str key, SymInt tile) -> Tensor[]",
)
def region_vjp(
    kept: list[Tensor], grads: list[Tensor], sizes: list[int], key: str, tile: int
) -> list[Tensor]:
    """Gradients of the inputs that need one. ``kept`` are the tensors that the body's sources name,
    in order (for tiles: all inputs, or the vectors), ``grads`` one per output that takes a
    gradient, ``sizes`` the values of the region's varying sizes."""
    kernels = lookup(key)
    with torch.autocast(grads[0].device.type, enabled=False):
        if kernels.makes_vectors:
            return _scaled(kept, grads)
        if kernels.region.tiled:
            return _backward_by_tiles(kernels, kept, grads, int(tile))
        body = kernels.body(sizes)
        given = [_as_traced(g, strides) for g, strides in zip(grads, body.grads, strict=True)]
        if kernels.region.groups > 1:
            return _backward_by_groups(kernels, body, kept, given)
        backward = _backward(body, key)
        read = [
            _as_traced(x, body.inputs[i]) if kind == "input" else x
            for x, (kind, i) in zip(kept, backward.read, strict=True)
        ]
        return fresh(list(backward(read, given)), [*kept, *grads])


def _backward(body: Body, key: str) -> Later:
    """What runs where a gradient came in."""
    assert body.backward is not None, f"region {key} was captured without a gradient"
    return body.backward


@region_vjp.register_fake
def _(
    kept: list[Tensor], grads: list[Tensor], sizes: list[Size], key: str, tile: int
) -> list[Tensor]:
    return lookup(key).fake_grads(sizes, grads[0].device)


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, ctx.key, ctx.tile, host, pace = inputs
    # torch takes an empty list for one of tensors, and leaves out what has its default's value
    ctx.grads_of_counts = [None if host else [], *([None] if pace else [])]
    kernels = lookup(ctx.key)
    ctx.kernels = kernels  # a backward may outlive the capture
    if not any(spec.needs_grad for spec in kernels.region.inputs):
        ctx.mark_non_differentiable(*output)  # though inputs may want one that nothing gives
        return
    ctx.sizes = kernels.sizes_of(tensors)
    count, asked = len(output), {("output" if i < 0 else "input", i) for i in host}
    if kernels.makes_vectors:
        count -= kernels.region.num_grads
        values = [_Value(vectors, own=True) for vectors in output[count:]]
    elif kernels.region.tiled:
        values = [_Value(x, _is_made(x)) for x in tensors]
    else:
        body = kernels.body(ctx.sizes)
        count = body.num_outputs
        values = [
            _Value(output[i], i >= count, ("output", -1) in asked)
            if kind == "output"
            else _Value(tensors[i], _is_made(tensors[i]), ("input", i) in asked)
            for kind, i in (body.backward.read if body.backward else ())
        ]
    _keep(ctx, values, pace, output[0].device)
    ctx.results = [(tuple(o.shape), o.dtype, o.device) for o in output[:count]]
    taken = {*kernels.grad_outputs}
    ctx.mark_non_differentiable(*(o for i, o in enumerate(output) if i not in taken))
    ctx.set_materialize_grads(False)


class _Value(NamedTuple):
    """A tensor that a backward reads."""

    tensor: Tensor  # itself
    own: bool  # nobody keeps it but for this backward
    asked: bool = False  # it shall wait in host memory


def _is_made(x: Tensor) -> bool:
    """Whether a tensor was computed by what is differentiated; weights and the batch were not, nor
    what looks at their memory."""
    return x.grad_fn is not None and (x._base is None or not x._base.is_leaf)


def _keep(ctx: Any, values: Sequence[_Value], pace: Sequence[int], device: torch.device) -> None:
    """Save values for the backward, those that are marked in host memory."""
    ctx.away = [value.asked and can_wait(value.tensor) for value in values]
    gone = [value.tensor for value, away in zip(values, ctx.away, strict=True) if away]
    ctx.stored = None
    if gone or pace:  # who keeps all on the GPU has a turn, too
        said = dict(zip(("sending", "fetching"), pace, strict=True)) if pace else {}
        ctx.stored = pool_of(device).store(gone, **said)
    here = [value for value, away in zip(values, ctx.away, strict=True) if not away]
    ctx.save_for_backward(*(value.tensor for value in here))
    join(ctx, [value.own for value in here])


def _kept(ctx: Any) -> list[Tensor]:
    """The tensors that ``_keep`` saved, fetched from the host where they wait there."""
    here, back = iter(ctx.saved_tensors), iter(ctx.stored.fetch() if ctx.stored else ())
    return [next(back) if away else next(here) for away in ctx.away]


def _from_context(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    device = ctx.results[0][2]
    found = iter(with_room(ctx, device, lambda: _gradients(ctx, grads)))
    if not ctx.kernels.runs_again():
        ctx.stored = None  # as autograd does with what it saved; who keeps the loss keeps ctx
    result = [next(found) if spec.needs_grad else None for spec in ctx.kernels.region.inputs]
    return (result, None, None, *ctx.grads_of_counts)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> list[Tensor]:
    given = []
    for index in ctx.kernels.grad_outputs:
        grad, (shape, dtype, device) = grads[index], ctx.results[index]
        given.append(torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad)
    vjp = torch.ops.fxrl.region_vjp
    found: list[Tensor] = vjp(_kept(ctx), given, list(ctx.sizes), ctx.key, ctx.tile)
    return found


region.register_autograd(_from_context, setup_context=_setup_context)
once_differentiable(region_vjp)


# ---------------------------------------------------------------------------- tiles
def tile_bounds(rows: int, tile: int, min_rows: int) -> list[tuple[int, int]]:
    """Split rows into even tiles of at most ``tile`` rows (but at least ``min_rows``).

    Even tiles leave no small remainder, so a body compiled for two or more rows serves all.
    """
    if rows == 0:
        return []
    count = -(-rows // max(tile, 1)) if tile else 1
    count = max(1, min(count, rows // max(min_rows, 1)))
    edges = [rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _rows_of(kernels: RegionKernels, inputs: Sequence[Tensor]) -> int:
    counts = {
        x.shape[0] for x, spec in zip(inputs, kernels.region.inputs, strict=True) if spec.tiled
    }
    if len(counts) != 1:
        raise RuntimeError(
            f"the inputs of region {kernels.key} have different numbers of rows "
            f"{sorted(counts)}; the loss pairs tensors of different token counts"
        )
    return counts.pop()


def _tile_inputs(
    kernels: RegionKernels, inputs: Sequence[Tensor], start: int, stop: int
) -> tuple[list[Tensor], int]:
    """The inputs of one tile, and how many of its rows are padding (copies of its last row)."""
    padding = max(0, kernels.min_rows - (stop - start))
    parts = []
    for x, spec in zip(inputs, kernels.region.inputs, strict=True):
        if spec.tiled:
            part = x[start:stop].contiguous()  # bodies are traced for contiguous rows
            x = torch.cat([part, part[-1:].expand(padding, *part.shape[1:])]) if padding else part
        parts.append(x)
    return parts, padding


def _forward_by_tiles(kernels: RegionKernels, inputs: list[Tensor], tile: int) -> list[Tensor]:
    rows = _rows_of(kernels, inputs)
    results: list[Tensor] = []
    for start, stop in tile_bounds(rows, tile, kernels.min_rows):
        parts, padding = _tile_inputs(kernels, inputs, start, stop)
        body = kernels.body(kernels.sizes_of(parts))
        outputs = list(body.forward(*parts))
        if kernels.makes_vectors:
            outputs = _with_vectors(kernels, body, parts, outputs)
        if not results:
            results = [o.new_empty((rows, *o.shape[1:])) for o in outputs]
        for whole, part in zip(results, outputs, strict=True):
            whole[start:stop] = part[: part.shape[0] - padding]
    return results or [*kernels.region.forward(*inputs), *new_vectors(kernels, inputs)]


def new_vectors(kernels: RegionKernels, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Where a region keeps its gradients: for each input ``[N, ...]`` that needs one, of its dtype,
    ``[N, K, ...]``, the gradients of the K outputs that take one by the input's row.

    NOTE [Why one vector per output]: an output is a number per row, and depends on that row of an
    input alone. So whatever the loss is, its gradient is one vector times the incoming scalar. Made
    beside the tile, it costs the products with the weights once, and the backward none.
    """
    count = len(kernels.grad_outputs) if kernels.makes_vectors else 0
    pairs = zip(inputs, kernels.region.inputs, strict=True)
    wanted = [x for x, spec in pairs if spec.needs_grad and count]
    return [x.new_empty((x.shape[0], count, *x.shape[1:])) for x in wanted]


def _with_vectors(
    kernels: RegionKernels, body: Body, parts: Sequence[Tensor], made: Sequence[Tensor]
) -> list[Tensor]:
    """A tile's outputs and vectors, from what its forward made of its ``parts``."""
    backward = _backward(body, kernels.key)
    read = [made[i] if kind == "output" else parts[i] for kind, i in backward.read]
    by_output = []
    for output in kernels.grad_outputs:
        units = [made[i].new_full(made[i].shape, float(i == output)) for i in kernels.grad_outputs]
        by_output.append(backward(read, units))
    stacked = (torch.stack(vectors, dim=1) for vectors in zip(*by_output, strict=True))
    return [*made[: body.num_outputs], *stacked]


def _scaled(vectors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a region's inputs from ``new_vectors`` and what comes in for its outputs: sums
    in fp32 at least, rounded once."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    given = torch.stack([grad.reshape(-1).to(wide) for grad in grads])
    found = []
    for each in vectors:
        rows, count, *rest = each.shape
        flat = each.reshape(rows, count, math.prod(rest)).transpose(0, 1)
        scaled = linear_logprob_scale(given, flat, each.dtype)
        found.append(scaled.view(rows, *rest))
    return found


def _backward_by_tiles(
    kernels: RegionKernels, inputs: list[Tensor], grads: list[Tensor], tile: int
) -> list[Tensor]:
    """Gradients of tiled inputs tile by tile; those of shared inputs are summed in fp32."""
    pairs = list(zip(inputs, kernels.region.inputs, strict=True))
    wanted = [(x, spec) for x, spec in pairs if spec.needs_grad]
    bounds = tile_bounds(_rows_of(kernels, inputs), tile, kernels.min_rows)
    sums = [_accumulator(x, spec.tiled, len(bounds)) for x, spec in wanted]
    for start, stop in bounds:
        parts, padding = _tile_inputs(kernels, inputs, start, stop)
        backward = _backward(kernels.body(kernels.sizes_of(parts)), kernels.key)
        given = [_pad(grad[start:stop], padding) for grad in grads]
        found = backward([parts[i] for _, i in backward.read], given)
        for total, part, (_, spec) in zip(sums, found, wanted, strict=True):
            if spec.tiled:
                total[start:stop] = part[: part.shape[0] - padding]
            else:
                total += part
    return [total.to(x.dtype) for total, (x, _) in zip(sums, wanted, strict=True)]


def _pad(grad: Tensor, padding: int) -> Tensor:
    if not padding:
        return grad.contiguous()
    return torch.cat([grad, grad.new_zeros((padding, *grad.shape[1:]))])


def _accumulator(x: Tensor, tiled: bool, num_tiles: int) -> Tensor:
    """Where an input's gradient is gathered."""
    if tiled:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.zeros(x.shape, dtype=sum_dtype(x.dtype, num_tiles), device=x.device)


def sum_dtype(dtype: torch.dtype, count: int) -> torch.dtype:
    """The dtype in which ``count`` values of a dtype are added up.

    NOTE [Why fp32 sums]: a shared input's gradient is a sum over tiles, or groups. Rounding each
    partial sum to bf16 biases training over a few dozen steps although each step's error looks the
    same.
    """
    low = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low and count > 1 else dtype


# ---------------------------------------------------------------------------- groups
def group_part(x: Tensor, spec: InputSpec, group: int) -> Tensor:
    """The part of a region's input that a group reads."""
    if spec.split is None:
        return x
    size = spec.example.shape[spec.split]
    return x.narrow(spec.split, group * size, size)


def side_by_side(part: Tensor, groups: int) -> Tensor:
    """Memory for what groups keep, ``[groups, ...]``, that of each laid out as ``part``."""
    shape, strides = (groups, *part.shape), (part.numel(), *part.stride())
    return torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)


def _forward_by_groups(region: Region, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    splits = [*[None] * body.num_outputs, *[BESIDE] * body.num_kept]
    sums = _GroupSums(splits, region.groups)
    for group in range(region.groups):
        parts = [
            _as_traced(group_part(x, spec, group), strides)
            for x, spec, strides in zip(inputs, region.inputs, body.inputs, strict=True)
        ]
        sums.add(group, body.forward(*parts))
    return sums.results()


@torch.library.custom_op(
    "fxrl::region_again",
    mutates_args=(),
    schema="(Tensor[] kept, SymInt[] sizes, str key) -> Tensor[]",
)
def region_again(kept: list[Tensor], sizes: list[int], key: str) -> list[Tensor]:
    """The outputs of a region's groups once more. ``kept`` are the tensors that the sources of
    ``Body.again`` name, in order, ``sizes`` as in ``region_vjp``."""
    kernels = lookup(key)
    with torch.autocast(kept[0].device.type, enabled=False):
        body, region = kernels.body(sizes), kernels.region
        assert body.again is not None, f"the groups of region {key} keep nothing"
        sums = _GroupSums([None] * body.num_outputs, region.groups)
        for group in range(region.groups):
            sums.add(group, body.again(_read_by_group(region, body, body.again, kept, group)))
        return sums.results()


@region_again.register_fake
def _(kept: list[Tensor], sizes: list[Size], key: str) -> list[Tensor]:
    return lookup(key).fake_again(sizes, kept[0].device)


def _read_by_group(
    region: Region, body: Body, later: Later, kept: Sequence[Tensor], group: int
) -> list[Tensor]:
    """A group's part of what all groups read behind the forward."""
    return [
        _as_traced(group_part(x, region.inputs[i], group), body.inputs[i])
        if kind == "input"
        else x[group]
        for x, (kind, i) in zip(kept, later.read, strict=True)
    ]


def _backward_by_groups(
    kernels: RegionKernels, body: Body, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """Gradients of split inputs group by group; those that groups share are summed."""
    region, backward = kernels.region, _backward(body, kernels.key)
    sums = _GroupSums([spec.split for spec in region.inputs if spec.needs_grad], region.groups)
    for group in range(region.groups):
        sums.add(group, backward(_read_by_group(region, body, backward, kept, group), grads))
    return sums.results()


#: Of a value that each group makes: it lies beside those of others, in a new first dim.
BESIDE: Final = -1


class _GroupSums:
    """Values that each group makes: put together along the dim that is split, or summed, or kept
    side by side.

    A caller that holds on to a group's values would have them beside the next group's.
    """

    def __init__(self, splits: Sequence[int | None], groups: int) -> None:
        self._splits, self._groups = splits, groups
        self._dtypes: list[torch.dtype] = []
        self._totals: list[Tensor] = []

    def add(self, group: int, parts: Sequence[Tensor]) -> None:
        """What one group has made."""
        if not self._totals:
            self._dtypes = [part.dtype for part in parts]
            self._totals = [*map(self._total, parts, self._splits)]
        for total, part, split in zip(self._totals, parts, self._splits, strict=True):
            if split is None:
                total += part
            elif split == BESIDE:
                total[group].copy_(part)
            else:
                total.narrow(split, group * part.shape[split], part.shape[split]).copy_(part)

    def results(self) -> list[Tensor]:
        """What all groups have made, in the dtypes of a group's values."""
        return [total.to(d) for total, d in zip(self._totals, self._dtypes, strict=True)]

    def _total(self, part: Tensor, split: int | None) -> Tensor:
        if split is None:
            return _accumulator(part, False, self._groups)
        if split == BESIDE:
            return side_by_side(part, self._groups)
        sizes = list(part.shape)
        sizes[split] *= self._groups
        return part.new_empty(sizes)
