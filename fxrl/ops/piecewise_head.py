"""``fxrl::piecewise_logprob``: ``fxrl::linear_logprob`` over a head that is not there in full.

    torch.ops.fxrl.piecewise_logprob(hidden, weight, target, weight_scale=..., format=...,
                                     vocab=..., dtype=..., outputs=..., ...)

    format                   weight                weight_scale    a piece of it is
    "part"                   this rank's, bytes    None            brought together from all ranks
    "fp8", "int4", "nf4"     values                scales          widened

as ``fxrl.ops.sharded`` and ``fxrl.ops.dequantized`` have them. For each piece of the vocabulary
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxrl.ops import dequantized, once_differentiable
from fxrl.ops.fp8 import BLOCK
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
from fxrl.ops.sharded import Reader, piece_rows, shards_of

#: What a piece's values are combined by, beside the values of the same name.
_BESIDE = {
    "logprob": {"lse"},
    "entropy": {"lse"},
    "sum_p2": {"lse"},
    "argmax_hit": {"max_logit"},
}
#: The format of a head of which each rank has a part.
PART = "part"
#: Bytes of a piece that is widened, at most: forward and backward of 4096 rows with Qwen3-8B's head
#: in FP8 take 27.3 ms with it, 38.9 with half of it, bound by launches, and 27.2 with twice (H200).
WIDENED = 256 * 2**20


class Held(NamedTuple):
    """How a head is held, whose values or bytes are ``LossHead.weight``; see the module."""

    weight_scale: Tensor | None  # of values in 8 or 4 bits
    format: str  # what they are
    vocab: int  # rows of the head
    dtype: torch.dtype  # that its pieces have when they are read

    def width(self, values: Tensor) -> int:
        """Columns of the head."""
        if self.format == PART:
            return values.shape[1] // self.dtype.itemsize
        return int(dequantized.sizes([values], self.format)[1])

    def piece_rows(self, values: Tensor) -> int:
        """Rows of a piece."""
        row_bytes = self.width(values) * self.dtype.itemsize
        if self.format == PART:
            return piece_rows(self.vocab, row_bytes)
        rows = piece_rows(self.vocab, row_bytes, WIDENED)
        return -(-rows // BLOCK) * BLOCK  # as scales by block want it

    def read(self, values: Tensor, reader: Reader) -> None:
        """Have the head read, piece by piece."""
        if self.format == PART:
            shards_of(values).read(values, self.vocab, self.dtype, reader)
        else:
            assert self.weight_scale is not None
            weight, step = [values, self.weight_scale], self.piece_rows(values)
            dequantized.read(weight, self.format, self.dtype, step, reader)

    def whole(self, head: LossHead) -> LossHead:
        """The head with a weight of its sizes in full, and no memory, as checks look at it."""
        empty = head.hidden.detach().new_empty(())
        return head._replace(weight=empty.expand(self.vocab, self.width(head.weight)))


_SEVEN = ", ".join(["Tensor"] * len(OUTPUTS))
_FIELDS, _HELD = len(LossHead._fields), len(Held._fields)
torch.library.define(
    "fxrl::piecewise_logprob",
    f"({schema_of(LossHead, with_defaults=True)}, {schema_of(Held)}, "
    f"str outputs='logprob', str? grad_outputs=None) -> ({_SEVEN})",
)


@torch.library.impl("fxrl::piecewise_logprob", "CompositeImplicitAutograd")
def _piecewise_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    outputs: str = "logprob",
    grad_outputs: str | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    held = Held(*(options.pop(name) for name in Held._fields))
    head = LossHead(hidden, weight, target, **options).on_one_device()
    if head.bias is not None:
        raise LinearLogprobError("a head in pieces takes no bias; add it to the logits")
    check_arguments(held.whole(head))
    wanted, differentiated = asked_outputs(outputs, grad_outputs)
    read = wanted.union(*(_BESIDE.get(name, set()) for name in wanted))
    if differentiated:  # a backward is made from both
        read |= {"logprob", "lse"}
    made = torch.ops.fxrl.piecewise_logprob_forward.default(*head, *held, joined_outputs(read))
    values = dict(zip(OUTPUTS, made, strict=True))
    fixed = {name: value.detach() for name, value in values.items()}
    rows = held.piece_rows(weight)
    combined = {
        name: _combined(name, values if name in differentiated else fixed, target, held.vocab, rows)
        for name in wanted
    }
    if (mask := head.row_mask) is not None:
        combined = {name: v.where(mask, v.new_zeros(())) for name, v in combined.items()}
    return tuple(combined.get(name, hidden.new_empty(0)) for name in OUTPUTS)


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
def _unpacked(positional: Sequence[Any]) -> tuple[LossHead, Held]:
    """What the ops' arguments begin with."""
    return LossHead(*positional[:_FIELDS]), Held(*positional[_FIELDS : _FIELDS + _HELD])


def _piece(head: LossHead, at: slice, weight: Tensor) -> LossHead:
    """The head of some tokens; where the target is none of them, any of them is."""
    target = (head.target - at.start).clamp(0, at.stop - at.start - 1)
    return head._replace(weight=weight.to(head.hidden.dtype), target=target)


def _empty(positional: Sequence[Any]) -> dict[str, Tensor]:
    (head, held), names = _unpacked(positional), parse_outputs(positional[-1])
    pieces = -(-held.vocab // held.piece_rows(head.weight))
    return {
        name: head.hidden.new_empty(
            (pieces, head.hidden.shape[0]) if name in names else (0,),
            dtype=torch.bool if name == "argmax_hit" else head.dtype,
        )
        for name in OUTPUTS
    }


@torch.library.custom_op(
    "fxrl::piecewise_logprob_forward",
    mutates_args=(),
    schema=f"({schema_of(LossHead)}, {schema_of(Held)}, str outputs) -> ({_SEVEN})",
)
def piecewise_logprob_forward(*positional: Any) -> tuple[Tensor, ...]:
    """Values [pieces, N], or [0], of each of ``OUTPUTS``."""
    (head, held), names = _unpacked(positional), parse_outputs(positional[-1])
    check_sizes(held.whole(head))
    check_target(held.whole(head))
    made, rows = _empty(positional), held.piece_rows(head.weight)

    def run(at: slice, weight: Tensor) -> None:
        piece = _piece(head, at, weight)
        values = torch.ops.fxrl.linear_logprob_forward.default(*piece, ",".join(names), "", False)
        for name, value in zip(OUTPUTS, values, strict=False):
            if name in names:
                made[name][at.start // rows] = value

    held.read(head.weight, run)
    return tuple(made.values())


@piecewise_logprob_forward.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(positional).values())


@torch.library.custom_op(
    "fxrl::piecewise_logprob_backward",
    mutates_args=(),
    schema=f"(Tensor grads, {schema_of(LossHead)}, {schema_of(Held)}, {schema_of(RowValues)}, "
    "str grad_outputs, bool want_hidden, bool want_temperature) -> (Tensor, Tensor)",
)
def piecewise_logprob_backward(grads: Tensor, *positional: Any) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and temperature, for ``grads`` [outputs, pieces, N] and the values
    [pieces, N] of the forward."""
    (head, held), values = _unpacked(positional), RowValues(*positional[_FIELDS + _HELD : -3])
    names, want_hidden, want_temperature = positional[-3:]
    rows = held.piece_rows(head.weight)
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

    held.read(head.weight, run)
    return hidden.to(head.hidden.dtype), temperature


def _like(wanted: Tensor | None, hidden: Tensor) -> Tensor:
    return hidden.new_empty(0) if wanted is None else torch.empty_like(wanted)


@piecewise_logprob_backward.register_fake
def _(grads: Tensor, *positional: Any) -> tuple[Tensor, Tensor]:
    (head, _), (want_hidden, want_temperature) = _unpacked(positional), positional[-2:]
    return (
        _like(head.hidden if want_hidden else None, head.hidden),
        _like(head.temperature if want_temperature else None, head.hidden),
    )


# ---------------------------------------------------------------------------- autograd
_HIDDEN, _TEMPERATURE = map(LossHead._fields.index, ("hidden", "temperature"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (head, held), names = _unpacked(inputs), parse_outputs(inputs[-1])
    *tensors, scale, softcap, chunk_tokens = head
    weight_scale, *layout = held
    values = dict(zip(OUTPUTS, output, strict=True))
    ctx.names = [name for name in OUTPUTS if name in names and name in DIFFERENTIABLE]
    ctx.mark_non_differentiable(*(v for name, v in values.items() if name not in ctx.names))
    ctx.set_materialize_grads(False)
    ctx.constants = scale, softcap, chunk_tokens
    ctx.layout = layout
    join(ctx)
    kept = (values[name] if name in names else None for name in RowValues._fields)
    ctx.save_for_backward(*tensors, weight_scale, *kept)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    made: list[Tensor | None] = [None] * (_FIELDS + _HELD + 1)
    incoming = dict(zip(OUTPUTS, grads, strict=True))
    given = {name: grad for name in ctx.names if (grad := incoming[name]) is not None}
    if not given:
        return tuple(made)
    *tensors, weight_scale, logprob, lse, entropy, sum_p2 = ctx.saved_tensors
    wants = ctx.needs_input_grad[_HIDDEN], ctx.needs_input_grad[_TEMPERATURE]
    backward = partial(
        torch.ops.fxrl.piecewise_logprob_backward.default,
        torch.stack([*given.values()]),
        *tensors,
        *ctx.constants,
        *(weight_scale, *ctx.layout),
        *(logprob, lse, entropy, sum_p2),
        ",".join(given),
        *wants,
    )
    found = with_room(ctx, lse.device, backward)
    for place, wanted, gradient in zip((_HIDDEN, _TEMPERATURE), wants, found, strict=True):
        made[place] = gradient if wanted else None
    return tuple(made)


piecewise_logprob_forward.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(piecewise_logprob_backward)
