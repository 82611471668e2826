"""The op pair of regions whose backward keeps: ``fxrl::kept_region`` and its vjp.

The forward returns its outputs and, behind them, what the backward needs of its inside; the graph
sees the outputs alone. As for every region the bodies are looked up by the region's id (see
``NOTE [Why an opaque op]``).

NOTE [Why what is kept are outputs of the op]: an opaque op can only save what autograd sees, its
inputs and outputs. PyTorch's own fused ops (attention's log-sum-exp) do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxrl.ir.graph import Size
from fxrl.ops.region import WithoutAutocast, fresh, lookup

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptBody:
    """The two halves of a kept region, for sizes alike.

    Attributes:
        forward: inputs -> outputs, then the values kept for the backward.
        backward: the values that ``sources`` names -> gradients of the inputs that need one; None
            where none does.
        sources: where each argument of ``backward`` is from: ``("input", i)``, ``("output", i)``
            (kept values count on), ``("grad", i)`` or ``("size", i)``.
        traced: the two as graphs, for fake tensors and for people.
        num_outputs: outputs of the region itself.
    """

    forward: Callable[..., Sequence[Tensor]]
    backward: Callable[..., Sequence[Tensor]] | None
    sources: tuple[tuple[str, int], ...]
    traced: tuple[Any, Any]
    num_outputs: int


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A body and what it expects at one set of sizes.

    Attributes:
        inputs: strides of each input that the body was traced for.
        grads: strides of each incoming gradient.
        sizes: the integers that ``backward`` takes.
    """

    body: KeptBody
    inputs: tuple[Strides, ...]
    grads: tuple[Strides, ...]
    sizes: tuple[int, ...]


class KeptKernels(Protocol):
    """What the backend makes of a kept region."""

    def sizes_of(self, inputs: Sequence[Tensor]) -> tuple[Size, ...]:
        """What the region's symbols are in these inputs."""

    def body(self, sizes: Sequence[Size]) -> KeptBody:
        """The body for these sizes; the first one where they are symbols themselves."""

    def call(self, sizes: Sequence[int]) -> KeptCall:
        """The body for these sizes, and what it expects at them."""

    def grad_shapes(self, sizes: Sequence[Size]) -> list[tuple[tuple[Size, ...], torch.dtype]]:
        """Shape and dtype of each gradient that the vjp returns."""


def _kept(region_id: str) -> KeptKernels:
    kept: KeptKernels | None = lookup(region_id).kept
    assert kept is not None, f"region {region_id} was built to recompute"
    return kept


def _as_traced(x: Tensor, strides: Strides) -> Tensor:
    """``x`` with the strides that the body was traced for; attention kernels differ in theirs."""
    if x.stride() == strides or not _differ(x, strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _differ(x: Tensor, strides: Strides) -> bool:
    return any(
        n > 1 and have != want for n, have, want in zip(x.shape, x.stride(), strides, strict=True)
    )


# ---------------------------------------------------------------------------- forward
@torch.library.custom_op(
    "fxrl::kept_region",
    mutates_args=(),
    schema="(Tensor[] inputs, str region_id) -> Tensor[]",
)
def kept_region(inputs: list[Tensor], region_id: str) -> list[Tensor]:
    """Run a region's forward; returns its outputs and what its backward needs."""
    kernels = _kept(region_id)
    call = kernels.call(kernels.sizes_of(inputs))  # type: ignore[arg-type]  # numbers by now
    given = [_as_traced(x, strides) for x, strides in zip(inputs, call.inputs, strict=True)]
    with WithoutAutocast(inputs[0].device):
        return fresh(list(call.body.forward(*given)), inputs)


@kept_region.register_fake
def _(inputs: list[Tensor], region_id: str) -> list[Tensor]:
    kernels = _kept(region_id)
    forward, _ = kernels.body(kernels.sizes_of(inputs)).traced
    return [_like(output) for output in forward(*inputs)]


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


# ---------------------------------------------------------------------------- backward
@torch.library.custom_op(
    "fxrl::kept_region_vjp",
    mutates_args=(),
    schema="(Tensor[] kept, Tensor[] grads, SymInt[] sizes, str region_id) -> Tensor[]",
)
def kept_region_vjp(
    kept: list[Tensor], grads: list[Tensor], sizes: list[int], region_id: str
) -> list[Tensor]:
    """Gradients of the inputs that need one.

    Args:
        kept: the tensors that the body's sources name, in their order.
        grads: one for each output that takes a gradient.
        sizes: what the region's symbols are.
    """
    call = _kept(region_id).call(sizes)
    given = [_as_traced(g, strides) for g, strides in zip(grads, call.grads, strict=True)]
    queue, numbers = iter(kept), call.sizes
    values = [
        given[i] if kind == "grad" else numbers[i] if kind == "size" else next(queue)
        for kind, i in call.body.sources
    ]
    assert call.body.backward is not None, f"region {region_id} was captured without a gradient"
    with WithoutAutocast(grads[0].device):
        return fresh(list(call.body.backward(*values)), [*kept, *grads])


@kept_region_vjp.register_fake
def _(kept: list[Tensor], grads: list[Tensor], sizes: list[Size], region_id: str) -> list[Tensor]:
    shapes = _kept(region_id).grad_shapes(sizes)
    return [torch.empty(s, dtype=d, device=grads[0].device) for s, d in shapes]


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, ctx.region_id = inputs
    kernels = _kept(ctx.region_id)
    ctx.sizes = kernels.sizes_of(tensors)
    body = kernels.body(ctx.sizes)
    kept = {"input": tensors, "output": output}
    ctx.save_for_backward(*(kept[kind][i] for kind, i in body.sources if kind in kept))
    ctx.results = [(tuple(o.shape), o.dtype, o.device) for o in output[: body.num_outputs]]
    ctx.mark_non_differentiable(*output[body.num_outputs :])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, None]:
    kernels = lookup(ctx.region_id)
    given = []
    for index in kernels.grad_outputs:
        grad, (shape, dtype, device) = grads[index], ctx.results[index]
        given.append(torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad)
    kept = list(ctx.saved_tensors)
    found = iter(torch.ops.fxrl.kept_region_vjp(kept, given, list(ctx.sizes), ctx.region_id))
    result = [next(found) if spec.needs_grad else None for spec in kernels.region.inputs]
    return result, None


kept_region.register_autograd(_backward, setup_context=_setup_context)
