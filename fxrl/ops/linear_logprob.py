"""``fxrl::linear_logprob``: log-probabilities of given tokens from hidden states, without logits.

What a graph pass emits (positional in this order; all after ``target`` have defaults):

    torch.ops.fxrl.linear_logprob.default(
        hidden,        Tensor [N, H]
        weight,        Tensor [V, H], hidden's dtype
        target,        Tensor [N] int64, in [0, V) where row_mask is True
        bias,          Tensor? [V]
        temperature,   Tensor? [] or [1] or [N], floating
        row_mask,      Tensor? [N] bool; a False row is not projected: value 0, gradient 0
        scale,         float = 1.0
        softcap,       float = 0.0, none
        outputs,       str = "logprob": comma-separated names, see below
        grad_outputs,  str? = None: those of them that are differentiated (None: all that can be)
        chunk_tokens,  int = 0: rows per tile (0: as many as keep a logits tile small)
    ) -> (logprob, lse, entropy, argmax_hit, sum_p2, mean_logit, max_logit)

with ``z = softcap * tanh(scale * (hidden weight^T + bias) / softcap) / temperature``.
Always seven tensors: ``[N]`` for a name in ``outputs``, else ``[0]``; float32 (float64 for float64
inputs), ``argmax_hit`` bool. ``logprob = z_y - lse``; ``argmax_hit``: the target is the first
maximum. ``argmax_hit``, ``max_logit`` and outputs outside ``grad_outputs`` are detached.

The op is a composite: it runs above autograd, sees who requires a gradient, and calls
``linear_logprob_forward``, to which device kernels attach
(``torch.library.register_kernel("fxrl::linear_logprob_forward", "cuda")``).

NOTE [Why the forward makes the gradient]
Each differentiable output depends on hidden row i alone, so its gradient is one vector u_i times
the incoming scalar g_i, whatever the loss is. With a frozen head u is made in the forward, while
the tile's logits exist: 4NHV FLOPs instead of 6NHV, and only u [N, H] is kept. At two
differentiated outputs (log-prob and entropy) both ways cost 6NHV; from three on, and for a
trainable head, the backward recomputes the tile and needs one float32 [V, H] for dW.

NOTE [Why a composite over two opaque ops and not one op]
Inside an op's kernel nobody can tell whether a gradient will be asked for: scoring would pay for
vectors that nothing reads, or the pass would have to bake the grad mode into the graph. The
composite is resolved by AOTAutograd (or eager autograd) at the moment that is known. The ``save_*``
arguments are a choice of cost, never of result: a gradient that was not saved is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_checks import (
    DIFFERENTIABLE,
    OUTPUTS,
    LinearLogprobError,
    check_arguments,
    checked_names,
    parse_outputs,
)
from fxrl.ops.linear_logprob_opaque import linear_logprob_forward, reduce_to_temperature

_MAX_SAVED_VECTORS = 2  # see NOTE [Why the forward makes the gradient]


class LinearLogprobOutput(NamedTuple):
    """What was asked for, ``[N]`` each; the rest is empty (``[0]``)."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    argmax_hit: Tensor
    sum_p2: Tensor
    mean_logit: Tensor
    max_logit: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    outputs: Sequence[str] = ("logprob",),
    grad_outputs: Sequence[str] | None = None,
    chunk_tokens: int = 0,
) -> LinearLogprobOutput:
    """The op with names instead of positions; see the module docstring for shapes and dtypes.

    Raises:
        LinearLogprobError: shapes, dtypes or names do not fit.
        TargetError: on the CPU, an unmasked target is outside ``[0, V)``.
    """
    return LinearLogprobOutput(
        *torch.ops.fxrl.linear_logprob.default(
            hidden,
            weight,
            target,
            bias,
            temperature,
            row_mask,
            scale,
            softcap,
            ",".join(outputs),
            None if grad_outputs is None else ",".join(grad_outputs),
            chunk_tokens,
        )
    )


torch.library.define(
    "fxrl::linear_logprob",
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, Tensor? temperature=None, "
    "Tensor? row_mask=None, float scale=1.0, float softcap=0.0, str outputs='logprob', "
    "str? grad_outputs=None, SymInt chunk_tokens=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("fxrl::linear_logprob", "CompositeImplicitAutograd")
def _linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    outputs: str = "logprob",
    grad_outputs: str | None = None,
    chunk_tokens: int = 0,
) -> tuple[Tensor, ...]:
    check_arguments(hidden, weight, target, bias, temperature, row_mask, scale, softcap)
    wanted = checked_names("outputs", outputs, OUTPUTS)
    differentiated = wanted & {*DIFFERENTIABLE}
    if grad_outputs is not None:
        differentiated = checked_names("grad_outputs", grad_outputs, differentiated)
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    save = torch.is_grad_enabled() and frozen and 0 < len(differentiated) <= _MAX_SAVED_VECTORS
    *values, _, _ = torch.ops.fxrl.linear_logprob_forward.default(
        hidden,
        weight,
        target,
        bias,
        temperature,
        row_mask,
        scale,
        softcap,
        ",".join(name for name in OUTPUTS if name in wanted),
        ",".join(name for name in DIFFERENTIABLE if name in differentiated),
        chunk_tokens,
        save and hidden.requires_grad,
        save and temperature is not None and temperature.requires_grad,
    )
    return tuple(values)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, temperature, row_mask, *rest = inputs
    scale, softcap, _, grad_outputs, chunk_tokens, has_hidden, has_temperature = rest
    *values, hidden_vectors, temperature_factors = output
    ctx.differentiated = parse_outputs(grad_outputs)
    ctx.set_materialize_grads(False)
    detached = [v for n, v in zip(OUTPUTS, values, strict=True) if n not in ctx.differentiated]
    ctx.mark_non_differentiable(*detached, hidden_vectors, temperature_factors)
    ctx.needs = (
        ctx.needs_input_grad[0],
        ctx.needs_input_grad[1],
        bias is not None and ctx.needs_input_grad[3],
        temperature is not None and ctx.needs_input_grad[4],
    )
    want_hidden, want_weight, want_bias, want_temperature = ctx.needs
    ctx.saved_in_forward = (
        not (want_weight or want_bias)
        and (has_hidden or not want_hidden)
        and (has_temperature or not want_temperature)
    )
    if ctx.saved_in_forward:
        ctx.save_for_backward(hidden_vectors, temperature_factors)
        ctx.hidden_dtype = hidden.dtype
        ctx.temperature_like = None
        if temperature is not None:
            ctx.temperature_like = (tuple(temperature.shape), temperature.dtype)
    else:
        ctx.save_for_backward(hidden, weight, target, bias, temperature, row_mask)
        ctx.constants = (scale, softcap, grad_outputs, chunk_tokens)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing: list[Tensor | None] = [None] * 13
    incoming = {n: g for n, g in zip(OUTPUTS, grads[: len(OUTPUTS)], strict=True)}
    given = [incoming[name] for name in ctx.differentiated]
    present = next((g for g in given if g is not None), None)
    if present is None:
        return tuple(nothing)
    stacked = torch.stack([torch.zeros_like(present) if g is None else g for g in given])
    if ctx.saved_in_forward:
        if torch.is_grad_enabled():
            # NOTE [Why refuse]: what the forward saved are constants to autograd, so a second
            # derivative would silently be zero. Only then does a backward run with gradients on.
            raise LinearLogprobError(
                "a second derivative through linear_logprob is asked for (create_graph=True), "
                "which it does not have; leave this head to eager with Config(passes=())"
            )
        want_hidden, _, _, want_temperature = ctx.needs
        vectors, factors = ctx.saved_tensors
        if want_hidden:
            nothing[0] = torch.ops.fxrl.linear_logprob_scale.default(
                stacked, vectors, ctx.hidden_dtype
            )
        if want_temperature:
            shape, dtype = ctx.temperature_like
            per_row = (stacked * factors).sum(0)
            nothing[4] = reduce_to_temperature(per_row, shape).to(dtype)
        return tuple(nothing)
    hidden, weight, target, bias, temperature, row_mask = ctx.saved_tensors
    made = torch.ops.fxrl.linear_logprob_backward.default(
        stacked, hidden, weight, target, bias, temperature, row_mask, *ctx.constants, *ctx.needs
    )
    for position, wanted, grad in zip((0, 1, 3, 4), ctx.needs, made, strict=True):
        if wanted:
            nothing[position] = grad
    return tuple(nothing)


linear_logprob_forward.register_autograd(_backward, setup_context=_setup_context)
