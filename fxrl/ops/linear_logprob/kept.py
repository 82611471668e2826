"""A trained loss head that keeps its exponentials: a product less, for N x V numbers.

    rows kept           forward 2NHV FLOPs    backward 6NHV: logits again, dH, dW
    exponentials kept   forward 2NHV          backward 4NHV: dH, dW

Row i's log-prob has the gradient ``masses[i] * exponentials[i, v]`` with respect to raw logit v:

    d logprob / d x_v = -s p_v f'(x_v)                v != y      s = scale / T, f the softcap
    d logprob / d x_y =  s (1 - p_y) f'(x_y)

``exponentials [N, V]`` have the dtype of the products, in which the gradient is rounded whether it
is kept or made again; ``masses [N]`` what all of a row share, in the accumulation dtype. Incoming
scalars g make the gradients of it:

    dH = (g masses) * (exponentials W)                dW = exponentials^T (g masses * H)

NOTE [Why the log-prob alone]
Every other differentiated output, and a sum of two, gives a row whose entries depend on what comes
in: it would take a pass over [N, V] in the backward, and a temperature or a bias that is trained
sums such entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.ops import no_second_derivative
from fxrl.ops.linear_logprob.arguments import (
    OUTPUTS,
    ForwardArguments,
    LossHead,
    joined_outputs,
    parse_outputs,
    schema_of,
    tensors,
)
from fxrl.ops.linear_logprob.checks import check_sizes, check_target
from fxrl.ops.linear_logprob.matmul import add_product, exact_products, product_dtype, slices
from fxrl.ops.linear_logprob.reference import Workspace, project_tile, row_statistics
from fxrl.ops.out_of_memory import join, with_room

#: Values by name as in ``ForwardResult``, exponentials, masses.
Kept = tuple[dict[str, Tensor], Tensor, Tensor]
Keeping = Callable[[ForwardArguments], Kept]
#: The rows of a matrix whose numbers are given.
Pick = Callable[[Tensor, Tensor], Tensor]

_FIELDS = len(LossHead._fields)
_HIDDEN, _WEIGHT = map(LossHead._fields.index, ("hidden", "weight"))
#: Entries that fill the 16 bytes at which TMA and cuBLAS want rows to begin, in bf16.
_ALIGNED = 8
#: Of the exponentials of the rows that count, picked out at a time where these are not all.
PICKED_BYTES = 256 * 2**20


def may_keep(head: LossHead, differentiated: set[str]) -> bool:
    """Whether a head that is called so can have its gradients made of exponentials."""
    others = (head.bias, head.temperature)
    return (
        head.weight.requires_grad
        and differentiated == {"logprob"}
        and head.row_mask is None
        and not any(t is not None and t.requires_grad for t in others)
    )


def kept_itemsize(dtype: torch.dtype) -> int:
    """Bytes of an exponential on a GPU, where the head is in ``dtype``."""
    return dtype.itemsize if dtype == torch.bfloat16 else wide_dtype(dtype).itemsize


def keeping(head: LossHead, outputs: set[str]) -> tuple[Tensor, ...]:
    """Each of ``OUTPUTS``, ``[N]`` or ``[0]``, of a head that ``may_keep``."""
    made: tuple[Tensor, ...] = torch.ops.fxrl.linear_logprob_keeping.default(
        *head, joined_outputs(outputs | {"logprob"})
    )
    return made[: len(OUTPUTS)]


def new_kept(arguments: ForwardArguments) -> Kept:
    """Tensors to fill; rows of exponentials begin aligned."""
    head = arguments.head
    (num_rows, _), (vocab, _) = head.hidden.shape, head.weight.shape
    padded = -(-vocab // _ALIGNED) * _ALIGNED
    entries = head.hidden.new_empty(num_rows, padded, dtype=product_dtype(head.weight))
    masses = head.hidden.new_empty(num_rows, dtype=head.dtype)
    return arguments.new_result().values, entries[:, :vocab], masses


def reference_keeping(arguments: ForwardArguments) -> Kept:
    """The specification of ``linear_logprob_keeping``."""
    head, space = arguments.head, Workspace(arguments.head)
    values, exponentials, masses = new_kept(arguments)
    for rows in head.tiles(None):
        tile = project_tile(head, rows, space, with_slope=True)
        made = row_statistics(head, tile, space, arguments.outputs, with_prob=True)
        for name in arguments.outputs:
            values[name][rows] = made[name].squeeze(1).to(values[name].dtype)
        entries = space.take("prob", tile.target.shape[0])
        entries.scatter_(1, tile.target, torch.expm1(made["logprob"]))
        exponentials[rows] = entries if tile.cap_slope is None else entries * tile.cap_slope
        masses[rows] = -head.row_slope(rows).squeeze(1)
    return values, exponentials, masses


def _op(run: Keeping) -> Callable[..., tuple[Tensor, ...]]:
    def op(*positional: Any) -> tuple[Tensor, ...]:
        arguments = _unpacked(positional)
        check_sizes(arguments.head)
        check_target(arguments.head)
        with exact_products(arguments.head.hidden):
            values, *kept = run(arguments)
        return (*(values[name] for name in OUTPUTS), *kept)

    return op


def _unpacked(positional: tuple[Any, ...]) -> ForwardArguments:
    outputs = parse_outputs(positional[_FIELDS])
    return ForwardArguments(LossHead(*positional[:_FIELDS]), outputs, ("logprob",), False)


linear_logprob_keeping = torch.library.custom_op(
    "fxrl::linear_logprob_keeping",
    _op(reference_keeping),
    mutates_args=(),
    schema=f"({schema_of(LossHead)}, str outputs) -> {tensors(len(OUTPUTS) + 2)}",
)


@linear_logprob_keeping.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    values, *kept = new_kept(_unpacked(positional))
    return (*(values[name] for name in OUTPUTS), *kept)


def attach_keeping(device_type: str, run: Keeping, pick: Pick) -> None:
    """Run these instead of the reference for tensors of a device."""
    linear_logprob_keeping.register_kernel(device_type, _op(run))
    backward = partial(kept_backward, pick)
    linear_logprob_kept_backward.register_kernel(device_type, backward)


def kept_backward(
    pick: Pick,
    grads: Tensor,
    hidden: Tensor,
    weight: Tensor,
    exponentials: Tensor,
    masses: Tensor,
    want_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden (``[0]`` if unwanted) and weight for ``grads [N]``.

    Rows that nothing comes in for are left out of the products; ``pick`` copies the others, some
    entries at a time.
    """
    live = (grads != 0).nonzero().squeeze(1)
    whole = live.shape[0] == hidden.shape[0]
    d_hidden = torch.zeros_like(hidden) if want_hidden else hidden.new_empty(0)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if not live.shape[0]:
        return d_hidden, d_weight.zero_()
    rows = slice(None) if whole else live
    factors = (grads * masses)[rows].unsqueeze(1)
    scaled = (hidden[rows] * factors).to(exponentials.dtype)
    sums = factors.new_empty(scaled.shape if want_hidden else (0,))
    narrow, vocab = scaled.dtype == weight.dtype, weight.shape[0]
    picked = PICKED_BYTES // (live.shape[0] * scaled.element_size()) // _ALIGNED * _ALIGNED
    with exact_products(hidden, narrow_result=True):
        for entries in slices(vocab, vocab if whole and narrow else max(_ALIGNED, picked)):
            part = exponentials[:, entries]
            part = part if whole else pick(part, live)
            if narrow:
                torch.mm(part.t(), scaled, out=d_weight[entries])
            else:
                d_weight[entries] = torch.mm(part.t(), scaled)
            if want_hidden:
                add_product(sums, part, weight[entries], begin=entries.start == 0)
    if want_hidden:
        d_hidden[rows] = sums.mul_(factors).to(hidden.dtype)
    return d_hidden, d_weight


linear_logprob_kept_backward = torch.library.custom_op(
    "fxrl::linear_logprob_kept_backward",
    partial(kept_backward, lambda matrix, rows: matrix.index_select(0, rows)),
    mutates_args=(),
    schema="(Tensor grads, Tensor hidden, Tensor weight, Tensor exponentials, Tensor masses, "
    "bool want_hidden) -> (Tensor, Tensor)",
)


@linear_logprob_kept_backward.register_fake
def _(*positional: Any) -> tuple[Tensor, Tensor]:
    _, hidden, weight, *_, want_hidden = positional
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return torch.empty_like(hidden) if want_hidden else hidden.new_empty(0), d_weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *others, exponentials, masses = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*others, exponentials, masses)
    join(ctx)
    ctx.save_for_backward(inputs[_HIDDEN], inputs[_WEIGHT], exponentials, masses)


def _backward(ctx: Any, grads: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    made: list[Tensor | None] = [None] * (_FIELDS + 1)
    if grads is None:
        return tuple(made)
    want_hidden = ctx.needs_input_grad[_HIDDEN]
    on_hidden, made[_WEIGHT] = with_room(
        ctx,
        grads.device,
        lambda: torch.ops.fxrl.linear_logprob_kept_backward.default(
            grads, *ctx.saved_tensors, want_hidden
        ),
    )
    made[_HIDDEN] = on_hidden if want_hidden else None
    return tuple(made)


linear_logprob_keeping.register_autograd(_backward, setup_context=_setup_context)
no_second_derivative(linear_logprob_kept_backward)
