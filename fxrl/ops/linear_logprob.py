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
the incoming scalar g_i, whatever the loss is. With a frozen head the vectors of log-prob and lse
are made in the forward, while the tile's logits exist: one product sum_{v != y} p_v W_v serves
both, so that forward and backward cost 4NHV FLOPs instead of 6NHV, and u [N, H] is kept. Any other
differentiated output (entropy, sum_p2, mean_logit) needs a product of its own: recomputing the
tile in the backward then costs the same 6NHV as a second vector would, or less, and keeps none.
So it does for a trainable head, which needs the logits' gradient for dW: one float32 [V, H].

NOTE [Why the backward is given the row's values]
With the forward's log-prob and lse (entropy, sum_p2) of a row, the logits' gradient is made from
each logit alone, where the product makes it, with no pass over the row in between. The composite
therefore asks the forward for what the backward will read beside what the user asked for. The
temperature's gradient of a frozen head needs no logit at all: z = softcap(..) / T gives
d logprob / dT = -(logprob + entropy) / T and d lse / dT = -(lse - entropy) / T.

NOTE [Why a composite over two opaque ops and not one op]
Inside an op's kernel nobody can tell whether a gradient will be asked for: scoring would pay for
vectors that nothing reads, or the pass would have to bake the grad mode into the graph. The
composite is resolved by AOTAutograd (or eager autograd) at the moment that is known.
``save_vectors`` is a choice of cost, never of result: a gradient that was not saved is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_arguments import reduce_to_temperature
from fxrl.ops.linear_logprob_checks import (
    DIFFERENTIABLE,
    MADE_IN_FORWARD,
    OUTPUTS,
    LinearLogprobError,
    check_arguments,
    checked_names,
    parse_outputs,
)
from fxrl.ops.linear_logprob_head import LossHead, RowValues
from fxrl.ops.linear_logprob_opaque import linear_logprob_forward

_INPUTS = 12  # of linear_logprob_forward
_ROW_VALUES = RowValues._fields


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
    if temperature is not None and temperature.dim() == 0:
        # As everywhere in PyTorch, one number may stay on the CPU.
        temperature = temperature.to(hidden.device)
    head = LossHead(
        hidden, weight, target, bias, temperature, row_mask, scale, softcap, chunk_tokens
    )
    check_arguments(head)
    wanted = checked_names("outputs", outputs, OUTPUTS)
    differentiated = wanted & {*DIFFERENTIABLE}
    if grad_outputs is not None:
        differentiated = checked_names("grad_outputs", grad_outputs, differentiated)
    read = _read_by_backward(head, differentiated) if torch.is_grad_enabled() else set()
    *values, _ = torch.ops.fxrl.linear_logprob_forward.default(
        *head,
        _joined(wanted | read),
        _joined(differentiated),
        bool(read) and hidden.requires_grad and _made_in_forward(head, differentiated),
    )
    pairs = zip(OUTPUTS, values, strict=True)
    return tuple(v if name in wanted else v.new_empty(0) for name, v in pairs)


def _joined(names: set[str]) -> str:
    return ",".join(name for name in OUTPUTS if name in names)


def _made_in_forward(head: LossHead, differentiated: set[str]) -> bool:
    frozen = not head.weight.requires_grad and not _trains(head.bias)
    return frozen and differentiated <= {*MADE_IN_FORWARD}


def _trains(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _read_by_backward(head: LossHead, differentiated: set[str]) -> set[str]:
    """Values that the gradients of ``differentiated`` are made from; none if nothing is trained."""
    trained = (head.hidden, head.weight, head.bias, head.temperature)
    if not differentiated or not any(map(_trains, trained)):
        return set()
    if _made_in_forward(head, differentiated):
        extra = {"entropy"} if _trains(head.temperature) else set()
    else:
        extra = differentiated & {"entropy", "sum_p2"}
    return {"logprob", "lse"} | extra


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *head, outputs, grad_outputs, save_vectors = inputs
    hidden, weight, target, bias, temperature, row_mask, *constants = head
    *values, vectors = output
    ctx.differentiated = parse_outputs(grad_outputs)
    ctx.set_materialize_grads(False)
    detached = [v for n, v in zip(OUTPUTS, values, strict=True) if n not in ctx.differentiated]
    ctx.mark_non_differentiable(*detached, vectors)
    ctx.needs = tuple(
        tensor is not None and ctx.needs_input_grad[position]
        for position, tensor in ((0, hidden), (1, weight), (3, bias), (4, temperature))
    )
    want_hidden, want_weight, want_bias, want_temperature = ctx.needs
    made = {name for name in parse_outputs(outputs) if name in DIFFERENTIABLE}
    row_values = [values[OUTPUTS.index(name)] if name in made else None for name in _ROW_VALUES]
    ctx.saved_in_forward = not ctx.differentiated or (
        not (want_weight or want_bias)
        and {*ctx.differentiated} <= {*MADE_IN_FORWARD}
        and (save_vectors or not want_hidden)
        and ("entropy" in made or not want_temperature)
    )
    if ctx.saved_in_forward:
        ctx.hidden_dtype = hidden.dtype
        factors = (*row_values[:3], temperature) if want_temperature else (None,) * 4
        ctx.save_for_backward(vectors if want_hidden else None, *factors)
    else:
        if not {"logprob", "lse"} <= made:
            raise LinearLogprobError(
                f"outputs={outputs!r}: a gradient reads logprob and lse; ask for both"
            )
        ctx.constants = constants
        ctx.save_for_backward(hidden, weight, target, bias, temperature, row_mask, *row_values)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    made: list[Tensor | None] = [None] * _INPUTS
    incoming = dict(zip(OUTPUTS, grads[: len(OUTPUTS)], strict=True))
    given = [incoming[name] for name in ctx.differentiated]
    present = next((g for g in given if g is not None), None)
    if present is None:
        return tuple(made)
    stacked = torch.stack([torch.zeros_like(present) if g is None else g for g in given])
    if ctx.saved_in_forward:
        made[0], made[4] = _scaled(ctx, stacked)
        return tuple(made)
    *tensors, logprob, lse, entropy, sum_p2 = ctx.saved_tensors
    gradients = torch.ops.fxrl.linear_logprob_backward.default(
        stacked,
        *tensors,
        *ctx.constants,
        *(logprob, lse, entropy, sum_p2),
        ",".join(ctx.differentiated),
        *ctx.needs,
    )
    for position, wanted, gradient in zip((0, 1, 3, 4), ctx.needs, gradients, strict=True):
        if wanted:
            made[position] = gradient
    return tuple(made)


def _scaled(ctx: Any, grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and temperature from what the forward saved; ``grads [K, N]``."""
    if torch.is_grad_enabled():
        # NOTE [Why refuse]: what the forward saved are constants to autograd, so a second
        # derivative would silently be zero. Only then does a backward run with gradients on.
        raise LinearLogprobError(
            "a second derivative through linear_logprob is asked for (create_graph=True), "
            "which it does not have; leave this head to eager with Config(passes=())"
        )
    vectors, logprob, lse, entropy, temperature = ctx.saved_tensors
    on_hidden = on_temperature = None
    if vectors is not None:
        on_hidden = torch.ops.fxrl.linear_logprob_scale.default(grads, vectors, ctx.hidden_dtype)
    if temperature is not None:
        # -inf is a banned target's log-prob; a row that the loss leaves out must not make it NaN.
        logprob = logprob.clamp(min=torch.finfo(logprob.dtype).min)
        slopes = {"logprob": -(logprob + entropy), "lse": entropy - lse}
        by_output = torch.stack([slopes[name] for name in ctx.differentiated])
        per_row = (grads * by_output).sum(0) / temperature.to(grads.dtype).reshape(-1)
        on_temperature = reduce_to_temperature(per_row, temperature)
    return on_hidden, on_temperature


linear_logprob_forward.register_autograd(_backward, setup_context=_setup_context)
