"""``fxrl::piecewise_logprob``: ``fxrl::linear_logprob`` over a head that is not there in full.

    torch.ops.fxrl.piecewise_logprob(hidden, weight, target, weight_scale=..., format=...,
                                     vocab=..., dtype=..., outputs=..., ...)

    format                   weight                weight_scale    a piece of it is
    "part"                   this rank's, bytes    None            brought together from all ranks
    "fp8", "int4", "nf4"     values                scales          widened
    "part:fp8", ...          this rank's values    scales          both

as ``fxrl.ops.sharded`` and ``fxrl.ops.dequantized`` have them. For each piece of the vocabulary
``linear_logprob_forward`` gives the row's values, as if there were no other token; with a_p a
piece's log-sum-exp, q the target's log-probability in its own piece o, and w_p = exp(a_p - a)

    lse a      = log sum_p exp(a_p)            entropy = sum_p w_p (entropy_p + a - a_p)
    logprob    = q - log(1 + sum_{p != o} exp(a_p - a_o))         sum_p2 = sum_p w_p^2 sum_p2_p

A confident token's q and its sum are both small, and neither is formed by subtraction.

NOTE [How the forward makes the gradient]: as ``linear_logprob``'s does for log-prob and lse of a
frozen head, and with no vector [N, H] for each piece. With u_p = d a_p / d h, t = d z_y / d h (the
target's row of the head, scaled) and v = d q / d h

    d lse / d h     = sum_p w_p u_p
    d logprob / d h = t - d lse / d h = w_o v + sum_{p != o} w_p (t - u_p)

While the pieces are read, what was summed so far is multiplied by exp(a_before - a_now) and a
piece's vector by exp(a_p - a_now), in float32. v = t - u_o is small where the target has most of
its piece's probability, and then it is v that is summed: no small gradient is a difference of large
ones. Rows beyond ``ROWS`` have the head read once more, for the sum takes 4 bytes an entry.

Where another output is differentiated each piece is projected once more in the backward, by
``linear_logprob_backward``, and autograd takes the way through the formulas above, which are plain
PyTorch over [pieces, N] numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.ops import dequantized, no_second_derivative
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    MADE_IN_FORWARD,
    OUTPUTS,
    ForwardArguments,
    LossHead,
    RowValues,
    in_order,
    joined_outputs,
    made_in_forward,
    parse_outputs,
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
from fxrl.ops.linear_logprob.matmul import slices
from fxrl.ops.linear_logprob.op import (
    keep_vectors,
    read_by_backward,
    scaled_vectors,
)
from fxrl.ops.out_of_memory import join, with_room
from fxrl.ops.sharded import Layout, Reader, shards_of

#: What a piece's values are combined by, beside the values of the same name.
_BESIDE = {
    "logprob": {"lse"},
    "entropy": {"lse"},
    "sum_p2": {"lse"},
    "argmax_hit": {"max_logit"},
}
#: The format of a head of which each rank has a part.
PART = "part"
#: Rows for which a head is read at a time, whether they are scored or trained.
ROWS = 8192
#: Bytes of a sum that are written at a time, at most.
_PART_OF_SUM = 64 * 2**20


class Held(NamedTuple):
    """How a head is held, whose values or bytes are ``LossHead.weight``; see the module."""

    weight_scale: Tensor | None  # of values in 8 or 4 bits
    format: str  # what they are
    vocab: int  # rows of the head
    dtype: torch.dtype  # that its pieces have when they are read

    @property
    def layout(self) -> Layout:
        """What its bytes mean, or those of this rank's part."""
        return Layout(self.vocab, self.dtype, self.format.removeprefix(PART).removeprefix(":"))

    def piece_rows(self, values: Tensor) -> int:
        """Rows of a piece."""
        return self.layout.step(values.shape[1])

    def read(self, values: Tensor, reader: Reader) -> None:
        """Have the head read, piece by piece."""
        weight = [values] if self.weight_scale is None else [values, self.weight_scale]
        if self.format.startswith(PART):
            shards_of(values).read(weight, self.layout, reader)
        else:
            step = self.piece_rows(values)
            dequantized.read(weight, self.format, self.dtype, step, reader)

    def whole(self, head: LossHead) -> LossHead:
        """The head with a weight of its sizes in full, and no memory, as checks look at it."""
        empty = head.hidden.detach().new_empty(())
        columns = self.layout.columns(head.weight.shape[1])
        return head._replace(weight=empty.expand(self.vocab, columns))


_FIELDS, _HELD = len(LossHead._fields), len(Held._fields)
torch.library.define(
    "fxrl::piecewise_logprob",
    f"({schema_of(LossHead, with_defaults=True)}, {schema_of(Held)}, "
    f"str outputs='logprob', str? grad_outputs=None) -> {tensors(len(OUTPUTS))}",
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
    in_forward = made_in_forward(head.trains_weights, differentiated)
    if torch.is_grad_enabled() and differentiated and in_forward:
        read = wanted | read_by_backward(head, differentiated)
        *made, _ = torch.ops.fxrl.piecewise_logprob_online.default(
            *head,
            *held,
            joined_outputs(read),
            joined_outputs(differentiated),
            hidden.requires_grad,
        )
        combined = dict(zip(OUTPUTS, made, strict=True))
    else:
        combined = _by_pieces(head, held, wanted, differentiated)
    if (mask := head.row_mask) is not None:
        combined = {n: v.where(mask, v.new_zeros(())) for n, v in combined.items() if n in wanted}
    empty = hidden.new_empty(0)
    return tuple(combined[name] if name in wanted else empty for name in OUTPUTS)


def _by_pieces(
    head: LossHead, held: Held, wanted: set[str], differentiated: set[str]
) -> dict[str, Tensor]:
    """Outputs [N] from the values of all pieces, by formulas that autograd takes."""
    read = wanted.union(*(_BESIDE.get(name, set()) for name in wanted))
    if differentiated:  # a backward is made from both
        read |= {"logprob", "lse"}
    found = torch.ops.fxrl.piecewise_logprob_forward.default(*head, *held, joined_outputs(read))
    values = dict(zip(OUTPUTS, found, strict=True))
    fixed = {name: value.detach() for name, value in values.items()}
    layout = head.target, held.vocab, held.piece_rows(head.weight)
    return {
        name: _combined(name, values if name in differentiated else fixed, *layout)
        for name in wanted
    }


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
    """The head and how it is held: the first of the ops' arguments."""
    return LossHead(*positional[:_FIELDS]), Held(*positional[_FIELDS : _FIELDS + _HELD])


def _piece(head: LossHead, at: slice, weight: Tensor) -> LossHead:
    """The head of some tokens; where the target is none of them, any of them is."""
    target = (head.target - at.start).clamp(0, at.stop - at.start - 1)
    return head._replace(weight=weight.to(head.hidden.dtype), target=target)


def _empty(head: LossHead, held: Held, names: Collection[str]) -> dict[str, Tensor]:
    """Uninitialised values: [pieces, N] for ``names``, [0] for the others."""
    pieces = -(-held.vocab // held.piece_rows(head.weight))
    return {
        name: head.hidden.new_empty(
            (pieces, head.hidden.shape[0]) if name in names else (0,),
            dtype=torch.bool if name == "argmax_hit" else head.dtype,
        )
        for name in OUTPUTS
    }


def _scored(
    head: LossHead, held: Held, names: Collection[str], vectors: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Values [pieces, N], or [0], of each of ``OUTPUTS``. ``vectors`` are [N, H] tensors to fill
    with the gradients of some of ``names``."""
    check_sizes(held.whole(head))
    check_target(held.whole(head))
    made = _empty(head, held, names)
    for rows in slices(head.hidden.shape[0], ROWS):
        some = head.of(rows)
        online = _Online(some) if vectors else None
        _score(some, held, {name: made[name][:, rows] for name in names}, online)
        if online is not None and vectors:
            for name, vector in vectors.items():
                online.write(name, vector[rows])
    return made


def _score(head: LossHead, held: Held, into: dict[str, Tensor], online: _Online | None) -> None:
    """Values [pieces, R] of these outputs, for which the head is read once."""
    step = held.piece_rows(head.weight)
    owner = _owner(head.target, held.vocab, step)[0]
    differentiated = ",".join(MADE_IN_FORWARD) if online is not None else ""
    asked = ",".join(into), differentiated, online is not None

    def read(at: slice, weight: Tensor) -> None:
        piece, place = _piece(head, at, weight), at.start // step
        *values, slopes = torch.ops.fxrl.linear_logprob_forward.default(*piece, *asked)
        for name, value in zip(OUTPUTS, values, strict=True):
            if name in into:
                into[name][place] = value
        if online is not None:
            online.add(piece, owner == place, values[0], values[1], slopes)

    held.read(head.weight, read)


def online_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes beside a piece for a gradient that is made in the forward: the sum, the targets' rows
    of the head, and a piece's vectors for log-prob and lse."""
    return min(rows, ROWS) * width * (wide_dtype(dtype).itemsize + 3 * dtype.itemsize)


class _Online:
    """Gradients of R rows, whose pieces come one by one; see the NOTE, whose letters these are."""

    def __init__(self, head: LossHead) -> None:
        self.head = head
        self.total = torch.zeros_like(head.hidden, dtype=head.dtype)  # of w_p u_p, and w_o v
        self.at_target = torch.zeros_like(head.hidden)  # the targets' rows of the head: t, unscaled
        start = self.total.new_full(head.target.shape, -torch.inf)
        self.lse = start  # a, of the pieces so far
        self.own = start  # a_o
        self.others = start  # of the pieces p != o
        self.logit = start  # z_y
        self.by_target = torch.zeros_like(head.target, dtype=torch.bool)  # v is summed, not u_o

    def add(
        self, piece: LossHead, own: Tensor, logprob: Tensor, lse: Tensor, slopes: Tensor
    ) -> None:
        """Add a piece. ``own`` [R] bool: whose targets are in it; ``logprob`` and ``lse`` [R] are
        its values, ``slopes`` [2, R, H] their gradients."""
        before, self.lse = self.lse, torch.logaddexp(self.lse, lse)
        kept, share = (before - self.lse).exp(), (lse - self.lse).exp()
        by_target = own & (logprob > -math.log(2))
        for rows in self._parts():
            mine, turned = own[rows, None], by_target[rows, None]
            vector = torch.where(turned, -slopes[0, rows], slopes[1, rows])
            total = self.total[rows].mul_(kept[rows, None])
            total.addcmul_(vector.to(total.dtype), share[rows, None])
            found = piece.weight[piece.target[rows]]
            self.at_target[rows] = torch.where(mine, found, self.at_target[rows])
        self.by_target |= by_target
        self.own, self.logit = lse.where(own, self.own), (logprob + lse).where(own, self.logit)
        self.others = torch.logaddexp(self.others, lse.where(~own, -torch.inf))

    def write(self, name: str, vector: Tensor) -> None:
        """The gradient [R, H] of ``"logprob"`` or ``"lse"``."""
        ahead = self.others - self.own
        if name == "logprob":
            share = torch.sigmoid(ahead).where(self.by_target, 1.0)
        else:
            share = torch.sigmoid(-ahead).where(self.by_target, 0.0)
        for rows in self._parts():
            slope = share[rows, None] * self.head.row_slope(rows)
            if self.head.softcap:
                slope = slope * self.head.cap_slope(rows, self.logit[rows, None])
            made = self.at_target[rows].to(slope.dtype) * slope
            total = self.total[rows]
            vector[rows] = (made - total if name == "logprob" else made + total).to(vector.dtype)

    def _parts(self) -> Iterator[slice]:
        rows, width = self.total.shape
        return slices(rows, max(1, _PART_OF_SUM // max(1, width * self.total.itemsize)))


@torch.library.custom_op(
    "fxrl::piecewise_logprob_forward",
    mutates_args=(),
    schema=f"({schema_of(LossHead)}, {schema_of(Held)}, str outputs) -> {tensors(len(OUTPUTS))}",
)
def piecewise_logprob_forward(*positional: Any) -> tuple[Tensor, ...]:
    """Values [pieces, N], or [0], of each of ``OUTPUTS``."""
    return tuple(_scored(*_unpacked(positional), parse_outputs(positional[-1])).values())


@piecewise_logprob_forward.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(*_unpacked(positional), parse_outputs(positional[-1])).values())


@torch.library.custom_op(
    "fxrl::piecewise_logprob_online",
    mutates_args=(),
    schema=f"({schema_of(LossHead)}, {schema_of(Held)}, str outputs, str grad_outputs, "
    f"bool save_vectors) -> {tensors(len(OUTPUTS) + 1)}",
)
def piecewise_logprob_online(*positional: Any) -> tuple[Tensor, ...]:
    """Each of ``OUTPUTS``, [N] or [0], and the gradients [K, N, H] of ``grad_outputs``, or [0]."""
    head, held = _unpacked(positional)
    names, differentiated = map(parse_outputs, positional[-3:-1])
    *made, vectors = _empty_online(positional)
    pairs = zip(differentiated, vectors, strict=True) if positional[-1] else ()
    read = {*names}.union(*(_BESIDE.get(name, set()) for name in names), MADE_IN_FORWARD)
    values = _scored(head, held, in_order(read), dict(pairs))
    layout = head.target, held.vocab, held.piece_rows(head.weight)
    for name, into in zip(OUTPUTS, made, strict=True):
        if name in names:
            into.copy_(_combined(name, values, *layout))
    return (*made, vectors)


def _empty_online(positional: Sequence[Any]) -> tuple[Tensor, ...]:
    arguments = ForwardArguments.unpack((*positional[:_FIELDS], *positional[-3:]))
    return arguments.new_result(torch.empty).pack()


@piecewise_logprob_online.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    return _empty_online(positional)


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


def _keep_vectors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (head, _), values = _unpacked(inputs), dict(zip(OUTPUTS, output[:-1], strict=True))
    names, ctx.differentiated = map(parse_outputs, inputs[-3:-1])
    ctx.mark_non_differentiable(
        *(v for name, v in values.items() if name not in ctx.differentiated), output[-1]
    )
    ctx.set_materialize_grads(False)
    join(ctx)
    kept = [values[name] if name in names else None for name in RowValues._fields]
    vectors = output[-1] if ctx.needs_input_grad[_HIDDEN] else None
    keep_vectors(ctx, head, vectors, kept, ctx.needs_input_grad[_TEMPERATURE])


def _scale_vectors(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return scaled_vectors(ctx, grads, [None] * (_FIELDS + _HELD + 3))


piecewise_logprob_online.register_autograd(_scale_vectors, setup_context=_keep_vectors)


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
no_second_derivative(piecewise_logprob_backward)
