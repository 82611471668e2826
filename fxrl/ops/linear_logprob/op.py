"""``fxrl::linear_logprob``: log-probabilities of given tokens from hidden states, without logits.

    torch.ops.fxrl.linear_logprob(hidden, weight, target, bias=..., outputs="logprob,entropy", ...)
        -> (logprob, lse, entropy, argmax_hit, sum_p2, mean_logit, max_logit)

with ``z = softcap * tanh(scale * (hidden weight^T + bias) / softcap) / temperature``. It takes what
``LossHead`` names, all after ``target`` by keyword, and

    outputs,       str = "logprob": comma-separated names, of ``OUTPUTS``
    grad_outputs,  str? = None: those of them that are differentiated (None: all that can be)
    keep_exponentials, bool = False: memory for time, where the head is trained (``kept``)

Always seven tensors: ``[N]`` for a name in ``outputs``, else ``[0]``; float32 (float64 for float64
inputs), ``argmax_hit`` bool. ``logprob = z_y - lse``; ``argmax_hit``: the target is the first
maximum. ``argmax_hit``, ``max_logit`` and outputs outside ``grad_outputs`` are detached.

The op is a composite: it runs above autograd, sees who requires a gradient, and calls the opaque
ops, whose eager reference runs on every device, in tiles of rows; nothing of size [N, V] exists. A
device's own kernels are given to ``attach``.

    linear_logprob_forward   values, and the gradient vectors that the backward will only scale
    linear_logprob_scale     the backward of a frozen head: incoming scalars times saved vectors
    linear_logprob_backward  the backward that recomputes each tile: hidden, head, temperature
    linear_logprob_keeping   the forward of a trained head that keeps its exponentials, see ``kept``

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxrl.ops import no_second_derivative
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    OUTPUTS,
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
    LossHead,
    RowValues,
    in_order,
    joined_outputs,
    made_in_forward,
    parse_outputs,
    reduce_to_temperature,
    schema_of,
    tensors,
)
from fxrl.ops.linear_logprob.checks import (
    LinearLogprobError,
    asked_outputs,
    check_arguments,
    check_sizes,
    check_target,
)
from fxrl.ops.linear_logprob.kept import Keeping, Pick, attach_keeping, keeping, may_keep
from fxrl.ops.linear_logprob.matmul import exact_products, slices
from fxrl.ops.linear_logprob.reference import reference_backward, reference_forward
from fxrl.ops.out_of_memory import join, with_room

Forward = Callable[[ForwardArguments], ForwardResult]
Backward = Callable[[BackwardArguments], Gradients]
Scale = Callable[[Tensor, Tensor, torch.dtype], Tensor]
_Op = Callable[..., tuple[Tensor, ...]]

_SCALE_BYTES = 16 * 2**20
_PLACES = tuple(map(LossHead._fields.index, ("hidden", "weight", "bias", "temperature")))


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
    outputs: Sequence[str] = ("logprob",),
    grad_outputs: Sequence[str] | None = None,
    **options: Any,
) -> LinearLogprobOutput:
    """The op with lists of names instead of text; ``options`` are the others of ``LossHead``.
    Raises ``LinearLogprobError`` for shapes, dtypes or names that do not fit, and on the CPU
    ``TargetError`` for an unmasked target outside ``[0, V)``."""
    options["outputs"] = ",".join(outputs)
    options["grad_outputs"] = None if grad_outputs is None else ",".join(grad_outputs)
    made = torch.ops.fxrl.linear_logprob.default(hidden, weight, target, **options)
    return LinearLogprobOutput(*made)


# -- the composite


torch.library.define(
    "fxrl::linear_logprob",
    f"({schema_of(LossHead, with_defaults=True)}, str outputs='logprob', str? grad_outputs=None, "
    f"bool keep_exponentials=False) -> {tensors(len(OUTPUTS))}",
)


@torch.library.impl("fxrl::linear_logprob", "CompositeImplicitAutograd")
def _linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    outputs: str = "logprob",
    grad_outputs: str | None = None,
    keep_exponentials: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    head = LossHead(hidden, weight, target, **options).on_one_device()
    check_arguments(head)
    wanted, differentiated = asked_outputs(outputs, grad_outputs)
    if keep_exponentials and torch.is_grad_enabled() and may_keep(head, differentiated):
        values = keeping(head, wanted)
    else:
        asked = asked_of_forward(head, outputs, grad_outputs)
        *values, _ = torch.ops.fxrl.linear_logprob_forward.default(
            *head,
            joined_outputs(asked.outputs),
            joined_outputs(asked.grad_outputs),
            asked.save_vectors,
        )
    pairs = zip(OUTPUTS, values, strict=True)
    return tuple(v if name in wanted else v.new_empty(0) for name, v in pairs)


def asked_of_forward(head: LossHead, outputs: str, grad_outputs: str | None) -> ForwardArguments:
    """What a call of the composite asks of the opaque forward."""
    wanted, differentiated = asked_outputs(outputs, grad_outputs)
    read = read_by_backward(head, differentiated) if torch.is_grad_enabled() else set()
    made = made_in_forward(head.trains_weights, differentiated)
    return ForwardArguments(
        head,
        in_order(wanted | read),
        in_order(differentiated),
        bool(read) and head.hidden.requires_grad and made,
    )


def _trains(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def read_by_backward(head: LossHead, differentiated: set[str]) -> set[str]:
    """Values that the gradients of ``differentiated`` are made from; none if nothing is trained."""
    if not differentiated or not any(map(_trains, head.trained)):
        return set()
    if made_in_forward(head.trains_weights, differentiated):
        extra = {"entropy"} if _trains(head.temperature) else set()
    else:
        extra = differentiated & {"entropy", "sum_p2"}
    return {"logprob", "lse"} | extra


# -- the opaque ops


def _forward_op(run: Forward) -> _Op:
    """``run`` with the op's positional arguments, checked, as the dtypes of its operands say."""

    def op(*positional: Any) -> tuple[Tensor, ...]:
        arguments = ForwardArguments.unpack(positional)
        check_sizes(arguments.head)
        check_target(arguments.head)
        with exact_products(arguments.head.hidden):
            return run(arguments).pack()

    return op


def _backward_op(run: Backward) -> _Op:
    def op(*positional: Any) -> tuple[Tensor, ...]:
        arguments = BackwardArguments.unpack(positional)
        with exact_products(arguments.head.hidden, narrow_result=arguments.want_weight):
            return run(arguments).pack(arguments)

    return op


linear_logprob_forward = torch.library.custom_op(
    "fxrl::linear_logprob_forward",
    _forward_op(reference_forward),
    mutates_args=(),
    schema=f"({schema_of(LossHead)}, str outputs, str grad_outputs, bool save_vectors)"
    f" -> {tensors(len(OUTPUTS) + 1)}",
)
linear_logprob_backward = torch.library.custom_op(
    "fxrl::linear_logprob_backward",
    _backward_op(reference_backward),
    mutates_args=(),
    schema=f"(Tensor grads, {schema_of(LossHead)}, {schema_of(RowValues)}, str grad_outputs, "
    "bool want_hidden, bool want_weight, bool want_bias, bool want_temperature)"
    f" -> {tensors(len(_PLACES))}",
)


@torch.library.custom_op("fxrl::linear_logprob_scale", mutates_args=())
def linear_logprob_scale(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """``sum_k grads[k, :, None] * vectors[k]`` as ``[N, H]``: wide arithmetic, rounded once."""
    _, num_rows, width = vectors.shape
    out = vectors.new_empty(num_rows, width, dtype=dtype)
    step = max(1, _SCALE_BYTES // max(1, width * grads.element_size()))
    for rows in slices(num_rows, step):
        out[rows] = (vectors[:, rows] * grads[:, rows, None]).sum(0).to(dtype)
    return out


def attach(
    device_type: str,
    forward: Forward,
    backward: Backward,
    scale: Scale,
    keeping: Keeping,
    pick: Pick,
) -> None:
    """Run these instead of the reference for tensors of a device.

    All but ``scale`` and ``pick`` find sizes checked, autocast off and products in full precision.
    """
    attach_keeping(device_type, keeping, pick)
    linear_logprob_forward.register_kernel(device_type, _forward_op(forward))
    linear_logprob_backward.register_kernel(device_type, _backward_op(backward))
    linear_logprob_scale.register_kernel(device_type, scale)


@linear_logprob_forward.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    return ForwardArguments.unpack(positional).new_result(torch.empty).pack()


@linear_logprob_scale.register_fake
def _(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    return vectors.new_empty(vectors.shape[1:], dtype=dtype)


@linear_logprob_backward.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    arguments = BackwardArguments.unpack(positional)
    hidden = arguments.head.hidden
    return tuple(
        hidden.new_empty(tensor.shape, dtype=tensor.dtype)
        if wanted and tensor is not None
        else hidden.new_empty(0)
        for tensor, wanted in zip(arguments.head.trained, arguments.wants, strict=True)
    )


# -- autograd of the forward


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *fields, outputs, grad_outputs, save_vectors = inputs
    head = LossHead(*fields)
    *values, vectors = output
    ctx.differentiated = parse_outputs(grad_outputs)
    ctx.set_materialize_grads(False)
    detached = [v for n, v in zip(OUTPUTS, values, strict=True) if n not in ctx.differentiated]
    ctx.mark_non_differentiable(*detached, vectors)
    needed = (ctx.needs_input_grad[place] for place in _PLACES)
    ctx.needs = tuple(t is not None and n for t, n in zip(head.trained, needed, strict=True))
    want_hidden, want_weight, want_bias, want_temperature = ctx.needs
    made = {name for name in parse_outputs(outputs) if name in DIFFERENTIABLE}
    row_values = [
        values[OUTPUTS.index(name)] if name in made else None for name in RowValues._fields
    ]
    join(ctx)
    ctx.saved_in_forward = not ctx.differentiated or (
        made_in_forward(want_weight or want_bias, ctx.differentiated)
        and (save_vectors or not want_hidden)
        and ("entropy" in made or not want_temperature)
    )
    if ctx.saved_in_forward:
        keep_vectors(ctx, head, vectors if want_hidden else None, row_values, want_temperature)
    else:
        if not {"logprob", "lse"} <= made:
            raise LinearLogprobError(
                f"outputs={outputs!r}: a gradient reads logprob and lse; ask for both"
            )
        *tensors, scale, softcap, chunk_tokens = head
        ctx.constants = scale, softcap, chunk_tokens
        ctx.save_for_backward(*tensors, *row_values)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    made: list[Tensor | None] = [None] * (len(LossHead._fields) + 3)
    if ctx.saved_in_forward:
        return scaled_vectors(ctx, grads, made)
    if (stacked := _stacked(ctx, grads)) is None:
        return tuple(made)
    *tensors, logprob, lse, entropy, sum_p2 = ctx.saved_tensors
    backward = partial(
        torch.ops.fxrl.linear_logprob_backward.default,
        stacked,
        *(*tensors, *ctx.constants, logprob, lse, entropy, sum_p2),
        ",".join(ctx.differentiated),
        *ctx.needs,
    )
    gradients = with_room(ctx, stacked.device, backward)
    for place, wanted, gradient in zip(_PLACES, ctx.needs, gradients, strict=True):
        if wanted:
            made[place] = gradient
    return tuple(made)


def _stacked(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor | None:
    """``[K, N]``: what comes in for ``ctx.differentiated``; None where nothing does."""
    incoming = dict(zip(OUTPUTS, grads[: len(OUTPUTS)], strict=True))
    given = [incoming[name] for name in ctx.differentiated]
    present = next((g for g in given if g is not None), None)
    if present is None:
        return None
    return torch.stack([torch.zeros_like(present) if g is None else g for g in given])


def keep_vectors(
    ctx: Any,
    head: LossHead,
    vectors: Tensor | None,
    values: Sequence[Tensor | None],
    want_temperature: bool,
) -> None:
    """Save what ``scaled_vectors`` reads: ``vectors`` [K, N, H] (None if hidden has no gradient),
    and for a temperature's gradient the ``RowValues``, entropy included."""
    ctx.hidden_dtype = head.hidden.dtype
    factors = (*values[:3], head.temperature) if want_temperature else (None,) * 4
    ctx.save_for_backward(vectors, *factors)


def scaled_vectors(
    ctx: Any, grads: Sequence[Tensor | None], made: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The backward of an op whose forward made the gradient. ``made`` has None for each argument of
    the op; its arguments begin with those of ``LossHead``."""
    if (stacked := _stacked(ctx, grads)) is not None:
        hidden, _, _, temperature = _PLACES
        made[hidden], made[temperature] = with_room(
            ctx, stacked.device, lambda: _scaled(ctx, stacked)
        )
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
no_second_derivative(linear_logprob_backward)
no_second_derivative(linear_logprob_scale)
