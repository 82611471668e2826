"""``fxrl::sharded_logprob``: ``fxrl::linear_logprob`` over a head of which each rank has a part.

    torch.ops.fxrl.sharded_logprob(hidden, part, target, vocab=..., dtype=..., outputs=..., ...)

The head comes in pieces of its vocabulary (``fxrl.ops.sharded``). For each of them
``linear_logprob_forward`` gives the row's values, as if there were no other token; with a_p a
piece's log-sum-exp, q the target's log-probability in its own piece o, and w_p = exp(a_p - a)

    lse a      = log sum_p exp(a_p)            entropy = sum_p w_p (entropy_p + a - a_p)
    logprob    = q - log(1 + sum_{p != o} exp(a_p - a_o))         sum_p2 = sum_p w_p^2 sum_p2_p

A confident token's q and its sum are both small, and neither is formed by subtraction. That is
plain PyTorch over [pieces, N] numbers, whose gradients autograd takes; ``linear_logprob_backward``
takes each piece's to the hidden states, and their sum is in float32.

NOTE [Why no gradient is made in the forward]: the weights of the pieces are known when the last one
is read, and until then there would be a vector [N, H] for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxrl.ops import once_differentiable
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    OUTPUTS,
    LossHead,
    RowValues,
    joined_outputs,
    parse_outputs,
    schema_of,
)
from fxrl.ops.linear_logprob.checks import (
    LinearLogprobError,
    asked_outputs,
    check_arguments,
    check_sizes,
    check_target,
)
from fxrl.ops.linear_logprob.matmul import slices
from fxrl.ops.out_of_memory import join, with_room
from fxrl.ops.sharded import piece_rows, shards_of

#: What a piece's values are combined by, beside the values of the same name.
_BESIDE = {
    "logprob": {"lse"},
    "entropy": {"lse"},
    "sum_p2": {"lse"},
    "argmax_hit": {"max_logit"},
}
_SEVEN = ", ".join(["Tensor"] * len(OUTPUTS))
_FIELDS = len(LossHead._fields)

torch.library.define(
    "fxrl::sharded_logprob",
    f"({schema_of(LossHead, with_defaults=True)}, int vocab, ScalarType dtype, "
    f"str outputs='logprob', str? grad_outputs=None) -> ({_SEVEN})",
)


@torch.library.impl("fxrl::sharded_logprob", "CompositeImplicitAutograd")
def _sharded_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab: int,
    dtype: torch.dtype,
    outputs: str = "logprob",
    grad_outputs: str | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    head = LossHead(hidden, weight, target, **options).on_one_device()
    if head.bias is not None:
        raise LinearLogprobError("a head that ranks share out takes no bias; add it to the logits")
    check_arguments(_whole(head, vocab, dtype))
    wanted, differentiated = asked_outputs(outputs, grad_outputs)
    read = wanted.union(*(_BESIDE.get(name, set()) for name in wanted))
    if differentiated:  # a backward is made from both
        read |= {"logprob", "lse"}
    made = torch.ops.fxrl.sharded_logprob_pieces.default(*head, vocab, dtype, joined_outputs(read))
    values = dict(zip(OUTPUTS, made, strict=True))
    fixed = {name: value.detach() for name, value in values.items()}
    rows = piece_rows(vocab, weight.shape[1])
    combined = {
        name: _combined(name, values if name in differentiated else fixed, target, vocab, rows)
        for name in wanted
    }
    if (mask := head.row_mask) is not None:
        combined = {name: v.where(mask, v.new_zeros(())) for name, v in combined.items()}
    return tuple(combined.get(name, hidden.new_empty(0)) for name in OUTPUTS)


def _whole(head: LossHead, vocab: int, dtype: torch.dtype) -> LossHead:
    """The head with a weight of its sizes in full, and no memory, as checks look at it."""
    width = head.weight.shape[1] // dtype.itemsize
    return head._replace(weight=head.hidden.detach().new_empty(()).expand(vocab, width))


def _owner(target: Tensor, vocab: int, rows: int) -> Tensor:
    """Which piece [1, N] has a row's target; any where a mask leaves the row out."""
    return target.clamp(0, vocab - 1).div(rows, rounding_mode="floor")[None]


def _combined(
    name: str, values: dict[str, Tensor], target: Tensor, vocab: int, rows: int
) -> Tensor:
    """An output [N] from the values [pieces, N] of all pieces."""
    given = values[name]
    if len(given) == 1:
        return given[0]
    owner, own = _owner(target, vocab, rows), given.new_empty(0)
    pieces = torch.arange(len(given), device=given.device)[:, None]
    if name in ("logprob", "argmax_hit"):
        own = given.gather(0, owner)[0]
    if name == "max_logit":
        return given.amax(0)
    if name == "mean_logit":
        shares = [(at.stop - at.start) / vocab for at in slices(vocab, rows)]
        return (given * given.new_tensor(shares)[:, None]).sum(0)
    if name == "argmax_hit":
        most = values["max_logit"]
        best = most.gather(0, owner)
        return own & ((most < best) | ((most == best) & (pieces >= owner))).all(0)
    sums = values["lse"]
    if name == "logprob":
        others = sums.masked_fill(pieces == owner, -torch.inf).logsumexp(0)
        ahead = others - sums.gather(0, owner)[0]
        return own - torch.logaddexp(ahead, torch.zeros_like(ahead))
    lse = sums.logsumexp(0)
    if name == "lse":
        return lse
    share = (sums - lse).exp()
    if name == "entropy":
        return (share * (given + lse - sums)).sum(0)
    return (share.square() * given).sum(0)


# ---------------------------------------------------------------------------- the opaque ops
def _unpacked(positional: Sequence[Any]) -> tuple[LossHead, int, torch.dtype, tuple[str, ...]]:
    vocab, dtype, names = positional[_FIELDS:]
    return LossHead(*positional[:_FIELDS]), vocab, dtype, parse_outputs(names)


def _piece(head: LossHead, at: slice, weight: Tensor) -> LossHead:
    """The head of some tokens; where the target is none of them, any of them is."""
    target = (head.target - at.start).clamp(0, at.stop - at.start - 1)
    return head._replace(weight=weight.to(head.hidden.dtype), target=target)


def _empty(positional: Sequence[Any]) -> dict[str, Tensor]:
    head, vocab, _, names = _unpacked(positional)
    pieces = -(-vocab // piece_rows(vocab, head.weight.shape[1]))
    return {
        name: head.hidden.new_empty(
            (pieces, head.hidden.shape[0]) if name in names else (0,),
            dtype=torch.bool if name == "argmax_hit" else head.dtype,
        )
        for name in OUTPUTS
    }


@torch.library.custom_op(
    "fxrl::sharded_logprob_pieces",
    mutates_args=(),
    schema=f"({schema_of(LossHead)}, int vocab, ScalarType dtype, str outputs) -> ({_SEVEN})",
)
def sharded_logprob_pieces(*positional: Any) -> tuple[Tensor, ...]:
    """Values [pieces, N], or [0], of each of ``OUTPUTS``."""
    head, vocab, dtype, names = _unpacked(positional)
    check_sizes(_whole(head, vocab, dtype))
    check_target(_whole(head, vocab, dtype))
    made, rows = _empty(positional), piece_rows(vocab, head.weight.shape[1])

    def run(at: slice, weight: Tensor) -> None:
        piece = _piece(head, at, weight)
        values = torch.ops.fxrl.linear_logprob_forward.default(*piece, ",".join(names), "", False)
        for name, value in zip(OUTPUTS, values, strict=False):
            if name in names:
                made[name][at.start // rows] = value

    shards_of(head.weight).read(head.weight, vocab, dtype, run)
    return tuple(made.values())


@sharded_logprob_pieces.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(positional).values())


@torch.library.custom_op(
    "fxrl::sharded_logprob_backward",
    mutates_args=(),
    schema=f"(Tensor grads, {schema_of(LossHead)}, {schema_of(RowValues)}, int vocab, "
    "ScalarType dtype, str grad_outputs, bool want_hidden, bool want_temperature) "
    "-> (Tensor, Tensor)",
)
def sharded_logprob_backward(grads: Tensor, *positional: Any) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and temperature, for ``grads`` [outputs, pieces, N] and the values
    [pieces, N] of the forward."""
    head, values = LossHead(*positional[:_FIELDS]), RowValues(*positional[_FIELDS:-5])
    vocab, dtype, names, want_hidden, want_temperature = positional[-5:]
    rows = piece_rows(vocab, head.weight.shape[1])
    hidden = head.hidden.new_zeros(head.hidden.shape if want_hidden else 0, dtype=head.dtype)
    temperature = _like(head.temperature if want_temperature else None, head.hidden).zero_()

    def run(at: slice, weight: Tensor) -> None:
        place = at.start // rows
        of_piece = RowValues._make(None if v is None else v[place] for v in values)
        wants = want_hidden, False, False, want_temperature
        on_hidden, _, _, on_temperature = torch.ops.fxrl.linear_logprob_backward.default(
            grads[:, place].contiguous(), *_piece(head, at, weight), *of_piece, names, *wants
        )
        hidden.add_(on_hidden)
        temperature.add_(on_temperature)

    shards_of(head.weight).read(head.weight, vocab, dtype, run)
    return hidden.to(head.hidden.dtype), temperature


def _like(wanted: Tensor | None, hidden: Tensor) -> Tensor:
    return hidden.new_empty(0) if wanted is None else torch.empty_like(wanted)


@sharded_logprob_backward.register_fake
def _(grads: Tensor, *positional: Any) -> tuple[Tensor, Tensor]:
    head, (want_hidden, want_temperature) = LossHead(*positional[:_FIELDS]), positional[-2:]
    return (
        _like(head.hidden if want_hidden else None, head.hidden),
        _like(head.temperature if want_temperature else None, head.hidden),
    )


# ---------------------------------------------------------------------------- autograd
_HIDDEN, _TEMPERATURE = map(LossHead._fields.index, ("hidden", "temperature"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    head, *ctx.layout, names = _unpacked(inputs)
    *tensors, scale, softcap, chunk_tokens = head
    values = dict(zip(OUTPUTS, output, strict=True))
    ctx.names = [name for name in OUTPUTS if name in names and name in DIFFERENTIABLE]
    ctx.mark_non_differentiable(*(v for name, v in values.items() if name not in ctx.names))
    ctx.set_materialize_grads(False)
    ctx.constants = scale, softcap, chunk_tokens
    join(ctx)
    kept = (values[name] if name in names else None for name in RowValues._fields)
    ctx.save_for_backward(*tensors, *kept)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    made: list[Tensor | None] = [None] * (_FIELDS + 3)
    incoming = dict(zip(OUTPUTS, grads, strict=True))
    given = {name: grad for name in ctx.names if (grad := incoming[name]) is not None}
    if not given:
        return tuple(made)
    *tensors, logprob, lse, entropy, sum_p2 = ctx.saved_tensors
    wants = ctx.needs_input_grad[_HIDDEN], ctx.needs_input_grad[_TEMPERATURE]
    backward = partial(
        torch.ops.fxrl.sharded_logprob_backward.default,
        torch.stack([*given.values()]),
        *tensors,
        *ctx.constants,
        *(logprob, lse, entropy, sum_p2),
        *ctx.layout,
        ",".join(given),
        *wants,
    )
    found = with_room(ctx, lse.device, backward)
    for place, wanted, gradient in zip((_HIDDEN, _TEMPERATURE), wants, found, strict=True):
        made[place] = gradient if wanted else None
    return tuple(made)


sharded_logprob_pieces.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(sharded_logprob_backward)
