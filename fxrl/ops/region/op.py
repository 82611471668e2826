"""The op behind every region: ``fxrl::region`` and its backward ``fxrl::region_vjp``.

The forward returns the region's outputs and, behind them, what its cut hands to the backward; the
graph sees the outputs alone. What runs is looked up by a key made of content and options.
``fxrl::region_again`` makes outputs once more of what is kept; what groups keep lies side by side
in a new first dim.

NOTE [Why an opaque op]: an autograd.Function that AOTAutograd inlines loses the saving under
Inductor, whose CSE merges the recomputed matmul with the forward's, and full-graph Inductor
batches unrolled tiles so that all are alive at once. Behind an op, tile count and token count are
run-time values, and one compiled body serves every shape.

NOTE [Why what is kept are outputs of the op]: an opaque op can only save what autograd sees, its
inputs and outputs. PyTorch's own fused ops (attention's log-sum-exp) do the same.

NOTE [Why who made an input is asked for it in the backward]: a segment of layers that keeps only
its first input runs forward again when the backward comes to its last layer, each layer asking the
one before. What they read on the way is held until their own backward, which is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxrl.ir.graph import Size, copy_like, memory_like
from fxrl.ops import no_second_derivative
from fxrl.ops.host_memory import can_wait, pool_of
from fxrl.ops.out_of_memory import join, with_room
from fxrl.ops.region.groups import again_by_groups, backward_by_groups, forward_by_groups
from fxrl.ops.region.kernels import (
    Body,
    Later,
    RegionKernels,
    Source,
    as_traced,
    backward_of,
    lookup,
)
from fxrl.ops.region.tiles import backward_by_tiles, forward_by_tiles, scaled


# ---------------------------------------------------------------------------- forward
@torch.library.custom_op(
    "fxrl::region",
    mutates_args=(),
    schema="(Tensor[] inputs, str key, SymInt tile, int[] host, int[] pace=[], int[] again=[]) "
    "-> Tensor[]",
)
def region(
    inputs: list[Tensor],
    key: str,
    tile: int,
    host: Sequence[int],
    pace: Sequence[int] = (),
    again: Sequence[int] = (),
) -> list[Tensor]:
    """Run a region's forward, whole, in tiles of ``tile`` rows or in its groups; returns outputs,
    then kept values.

    Inputs in ``host`` wait in host memory for the backward; -1 stands for all kept values. ``pace``
    is ``sending`` and ``fetching`` of ``HostPool.store``, empty if not planned. Inputs in ``again``
    wait nowhere: the regions that returned them make them again.
    """
    kernels = lookup(key)
    # Bodies already contain the casts that autocast asked for when they were captured.
    with torch.autocast(inputs[0].device.type, enabled=False):
        if kernels.region.tiled:
            return forward_by_tiles(kernels, inputs, int(tile))
        body = kernels.body(kernels.bound.read(inputs))
        if kernels.region.groups > 1:
            return forward_by_groups(kernels.region, body, inputs)
        given = [as_traced(x, strides) for x, strides in zip(inputs, body.inputs, strict=True)]
        return fresh(list(body.forward(*given)), inputs)


@region.register_fake
def _(inputs: list[Tensor], key: str, *_: Any) -> list[Tensor]:
    return [*map(memory_like, lookup(key).fake_outputs(inputs))]


def fresh(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no storage with the inputs or each other, as an op must return."""
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    result = []
    for output in outputs:
        pointer = output.untyped_storage().data_ptr()
        shared = pointer in seen and output.numel()
        # in the same layout, as the op says: a clone of a slice would have another
        result.append(copy_like(output) if shared else output)
        seen.add(result[-1].untyped_storage().data_ptr())
    return result


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
            return scaled(kept, grads)
        if kernels.region.tiled:
            return backward_by_tiles(kernels, kept, grads, int(tile))
        body = kernels.body(sizes)
        given = [as_traced(g, strides) for g, strides in zip(grads, body.grads, strict=True)]
        if kernels.region.groups > 1:
            return backward_by_groups(kernels, body, kept, given)
        backward = backward_of(body, key)
        return fresh(list(backward(_read(body, backward, kept), given)), [*kept, *grads])


def _read(body: Body, later: Later, kept: Sequence[Tensor]) -> list[Tensor]:
    """What runs behind the forward reads, as it was traced."""
    return [
        as_traced(x, body.inputs[i]) if kind == "input" else x
        for x, (kind, i) in zip(kept, later.read, strict=True)
    ]


@region_vjp.register_fake
def _(
    kept: list[Tensor], grads: list[Tensor], sizes: list[Size], key: str, tile: int
) -> list[Tensor]:
    return lookup(key).fake_grads(sizes, grads[0].device)


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, ctx.key, ctx.tile, *counts = inputs
    host, pace, again = counts
    # torch leaves out what has its default's value at the end, and takes an empty list for one of
    # tensors
    given = 3 if again else 2 if pace else 1
    ctx.grads_of_counts = [None if count else [] for count in counts[:given]]
    kernels = lookup(ctx.key)
    ctx.kernels = kernels  # a backward may outlive the capture
    if not any(spec.needs_grad for spec in kernels.region.inputs):
        ctx.mark_non_differentiable(*output)  # though inputs may want one that nothing gives
        return
    ctx.sizes = kernels.bound.read(tensors)
    count = len(output)
    if kernels.makes_vectors:
        count -= kernels.region.num_grads
        ctx.read = ctx.sources = [("output", i) for i in range(count, len(output))]
    elif kernels.region.tiled:
        ctx.read = ctx.sources = [("input", i) for i in range(len(tensors))]
    else:
        body = kernels.body(ctx.sizes)
        count, ctx.read = body.num_outputs, body.backward.read if body.backward else ()
        ctx.sources = _waiting(kernels, body, len(tensors))
    values = [
        _Value(output[i], i >= count, -1 in host)
        if kind == "output"
        else _Value(tensors[i], _is_made(tensors[i]), i in host, i in again)
        for kind, i in ctx.sources
    ]
    _keep(ctx, values, pace, output[0].device)
    ctx.held = None
    ctx.results = [(tuple(o.shape), o.dtype, o.device) for o in output[:count]]
    taken = {*kernels.grad_outputs}
    ctx.mark_non_differentiable(*(o for i, o in enumerate(output) if i not in taken))
    ctx.set_materialize_grads(False)


def _waiting(kernels: RegionKernels, body: Body, num_inputs: int) -> list[Source]:
    """What waits for a backward: what it reads, or what makes that, and the outputs, again."""
    if body.backward is None:
        return []
    if kernels.region.again == "forward":
        return [("input", i) for i in range(num_inputs)]
    later = filter(None, (body.backward, body.again))
    return list(dict.fromkeys(source for half in later for source in half.read))


class _Value(NamedTuple):
    """A tensor that a backward reads."""

    tensor: Tensor  # itself
    own: bool  # nobody keeps it but for this backward
    asked: bool = False  # it shall wait in host memory
    again: bool = False  # who made it shall make it again


def _is_made(x: Tensor) -> bool:
    """Whether a tensor was computed by what is differentiated; weights and the batch were not, nor
    what looks at their memory."""
    return x.grad_fn is not None and (x._base is None or not x._base.is_leaf)


def _keep(ctx: Any, values: Sequence[_Value], pace: Sequence[int], device: torch.device) -> None:
    """Save values for the backward, those that are marked in host memory or nowhere."""
    # by source, the context of the region that makes it again, and which of the outputs it is
    made = zip(ctx.sources, values, strict=True)
    ctx.makers = {s: (v.tensor.grad_fn, v.tensor.output_nr) for s, v in made if v.again}
    ctx.away = [v.asked and not v.again and can_wait(v.tensor) for v in values]
    gone = [value.tensor for value, away in zip(values, ctx.away, strict=True) if away]
    ctx.stored = None
    if gone or pace:  # who keeps all on the GPU has a turn, too
        said = dict(zip(("sending", "fetching"), pace, strict=True)) if pace else {}
        ctx.stored = pool_of(device).store(gone, **said)
    pairs = zip(values, ctx.away, strict=True)
    here = [value for value, away in pairs if not (away or value.again)]
    ctx.save_for_backward(*(value.tensor for value in here))
    join(ctx, [value.own for value in here])


def _found(ctx: Any, *, ahead: bool) -> dict[Source, Tensor]:
    """All that waits for a backward, by source: here, or fetched from the host, letting others set
    out ``ahead`` of their own backward, or made again."""
    here = iter(ctx.saved_tensors)
    back = iter(ctx.stored.fetch(ahead=ahead) if ctx.stored else ())
    made = {context: _again(context) for context in {maker for maker, _ in ctx.makers.values()}}
    found: dict[Source, Tensor] = {}
    for source, away in zip(ctx.sources, ctx.away, strict=True):
        if source in ctx.makers:
            context, place = ctx.makers[source]
            found[source] = made[context][place]
        else:
            found[source] = next(back) if away else next(here)
    ctx.versions = {source: x._version for source, x in found.items()}
    return found


def _again(ctx: Any) -> list[Tensor]:
    """A region's outputs once more. What that takes is held for its own backward."""
    kernels = ctx.kernels
    if ctx.held is None:
        ctx.held = _found(ctx, ahead=False)
    held = ctx.held
    with torch.no_grad():
        if kernels.region.again != "forward":
            kept = [held[source] for source in kernels.body(ctx.sizes).again.read]
            outputs: list[Tensor] = torch.ops.fxrl.region_again(kept, list(ctx.sizes), ctx.key)
            return outputs
        inputs = [held["input", i] for i in range(len(kernels.region.inputs))]
        made = torch.ops.fxrl.region(inputs, ctx.key, ctx.tile, [])
    held |= {(kind, i): made[i] for kind, i in ctx.read if kind == "output"}
    return list(made[: len(ctx.results)])


def _kept(ctx: Any) -> list[Tensor]:
    """The tensors that the backward reads."""
    if ctx.held is None:
        ctx.held = _found(ctx, ahead=True)
    else:  # autograd looks for writes where it hands a tensor out, which was before
        if any(ctx.held[source]._version != was for source, was in ctx.versions.items()):
            raise RuntimeError(
                "a tensor that this backward reads was written into in place since the layer "
                "behind it was differentiated"
            )
        if ctx.stored:
            ctx.stored.set_out()
    if not ctx.held.keys() >= {*ctx.read}:
        _again(ctx)  # nobody has asked for the outputs, or memory ran out on the way
    held, ctx.held = ctx.held, None
    return [held[source] for source in ctx.read]


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
no_second_derivative(region_vjp)


@torch.library.custom_op(
    "fxrl::region_again",
    mutates_args=(),
    schema="(Tensor[] kept, SymInt[] sizes, str key) -> Tensor[]",
)
def region_again(kept: list[Tensor], sizes: list[int], key: str) -> list[Tensor]:
    """The outputs of a region once more. ``kept`` are the tensors that the sources of
    ``Body.again`` name, in order, ``sizes`` as in ``region_vjp``."""
    kernels = lookup(key)
    body = kernels.body(sizes)
    assert body.again is not None, f"region {key} was not to make its outputs again"
    with torch.autocast(kept[0].device.type, enabled=False):
        if kernels.region.groups > 1:
            return again_by_groups(kernels, body, kept)
        return fresh(list(body.again(_read(body, body.again, kept))), kept)


@region_again.register_fake
def _(kept: list[Tensor], sizes: list[Size], key: str) -> list[Tensor]:
    return lookup(key).fake_again(sizes, kept[0].device)
