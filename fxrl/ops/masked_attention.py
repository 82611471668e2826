"""``fxrl::masked_attention``: attention under a mask that is computed and never stored.

    torch.ops.fxrl.masked_attention(query, key, value, vectors, blocks, mask, scale) -> (out, lse)

A mask is an expression over the index of a query, the index of a key and vectors (document ids,
what is padding) that have an entry for each query or for each key, and none for a pair of them:

    mask     "bitwise_and(le(key, query), v0)"     ops of ATen by name; v0 is the first vector
    vectors  [B|1, H|1, Tq|1, 1] or [B|1, H|1, 1, Tk|1], any dtype
    blocks   what ``fxrl::mask_blocks`` found, once for all layers: where nothing is seen nothing
             is computed

    query [B, H, Tq, D], key [B, G, Tk, D], value [B, G, Tk, E]: heads in G groups
    out [B, H, Tq, E] (in memory [B, Tq, H, E]); lse [B, H, Tq], the base-2 logarithm of the sum
    of exponentials, -inf for a query that sees no key, whose output is zero

The eager reference makes the mask in tiles of queries, runs on every device and is exact in
float64; a device's own kernels are attached where they are (``compile.bodies.flex``).

NOTE [Why text]: an op's schema has no functions. Text is its own key: it is seen in every printed
graph, is a part of a region's content, and needs nobody who keeps an object alive.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from typing import Any

import torch
from torch import Tensor

from fxrl.dtypes import at_least_float32, wide_dtype
from fxrl.ops import no_second_derivative
from fxrl.ops.linear_logprob.matmul import slices

#: Queries, and keys, of a block: what kernels skip or see as a whole.
BLOCK = 128
#: Pairs of query and key looked at at a time: for blocks bools, for the reference scores.
_BLOCKS_AT_ONCE, _SCORES_AT_ONCE = 2**26, 2**24
_LN2 = log(2.0)

Values = Mapping[str, Any]


# ---------------------------------------------------------------------------- the expression
@cache
def expression(mask: str) -> Callable[[Values], Any]:
    """Compile the text of a mask to a function of the values of its names."""
    return _compiled(ast.parse(mask, mode="eval").body)


def _compiled(node: ast.AST) -> Callable[[Values], Any]:
    if isinstance(node, ast.Constant):
        constant = node.value
        return lambda values: constant
    if isinstance(node, ast.Name):
        name = node.id
        return lambda values: values[name]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        positive = _compiled(node.operand)
        return lambda values: -positive(values)
    assert isinstance(node, ast.Call), f"{ast.unparse(node)} is no part of a mask"
    assert isinstance(node.func, ast.Name)
    function = getattr(torch.ops.aten, node.func.id)
    args = [_compiled(arg) for arg in node.args]
    return lambda values: function(*(arg(values) for arg in args))


def _tile(
    mask: str, vectors: Sequence[Tensor], rows: slice, keys: int, device: torch.device
) -> Tensor:
    """The mask of some queries as bool [B|1, H|1, rows, keys]."""
    values: dict[str, Tensor] = {
        "query": torch.arange(rows.start, rows.stop, device=device)[:, None],
        "key": torch.arange(keys, device=device),
    }
    for index, vector in enumerate(vectors):
        values[f"v{index}"] = vector if vector.shape[2] == 1 else vector[:, :, rows]
    made = torch.as_tensor(expression(mask)(values), device=device)
    made = made[(None,) * (4 - made.dim())]
    return made.expand(made.shape[0], made.shape[1], rows.stop - rows.start, keys)


def _tiles(queries: int, width: int, most: int) -> Iterator[slice]:
    """Queries, in whole blocks, that take about ``most`` values each if one takes ``width``."""
    return slices(queries, max(1, most // max(1, width * BLOCK)) * BLOCK)


# ---------------------------------------------------------------------------- the blocks
@torch.library.custom_op(
    "fxrl::mask_blocks",
    mutates_args=(),
    schema="(Tensor[] vectors, str mask, SymInt queries, SymInt keys, Device device) -> Tensor[]",
)
def mask_blocks(
    vectors: Sequence[Tensor], mask: str, queries: int, keys: int, device: torch.device
) -> list[Tensor]:
    """Which blocks of ``BLOCK`` queries and keys a mask leaves in part, and which in full.

    Returns int32 counts [B|1, H|1, n] and indices [B|1, H|1, n, m], for each block of queries, of
    the key blocks left in part, then of those left in full; and the same four for each block of
    keys.
    """
    shape = _leading(vectors)
    rows, columns = (-(-size // BLOCK) for size in (queries, keys))
    some = torch.zeros(*shape, rows, columns, dtype=torch.bool, device=device)
    whole = torch.zeros_like(some)
    for here in _tiles(queries, shape[0] * shape[1] * keys, _BLOCKS_AT_ONCE):
        tile = _tile(mask, vectors, here, keys, device).expand(*shape, -1, -1)
        pad = (0, columns * BLOCK - keys, 0, -tile.shape[2] % BLOCK)
        tile = torch.unflatten(torch.nn.functional.pad(tile, pad), 3, (-1, BLOCK))
        tile = torch.unflatten(tile, 2, (-1, BLOCK))
        place = slice(here.start // BLOCK, here.start // BLOCK + tile.shape[2])
        some[:, :, place] = tile.any(5).any(3)
        whole[:, :, place] = tile.all(5).all(3)
    some &= ~whole
    sides = (some, whole, some.transpose(2, 3), whole.transpose(2, 3))
    return [part for side in sides for part in _listed(side)]


@mask_blocks.register_fake
def _(
    vectors: Sequence[Tensor], mask: str, queries: Any, keys: Any, device: torch.device
) -> list[Tensor]:
    rows, columns = ((size + BLOCK - 1) // BLOCK for size in (queries, keys))
    made = []
    for n, m in ((rows, columns), (rows, columns), (columns, rows), (columns, rows)):
        for shape in ((*_leading(vectors), n), (*_leading(vectors), n, m)):
            made.append(torch.empty(shape, dtype=torch.int32, device=device))
    return made


def share_of_blocks(blocks: Sequence[Tensor]) -> float:
    """The share of block pairs of ``mask_blocks`` in which something is attended to."""
    some, places, whole = blocks[:3]
    return float((some + whole).sum()) / max(1, places.numel())


def _leading(vectors: Sequence[Tensor]) -> tuple[Any, Any]:
    """Batch and heads of a mask: 1 where no vector differs there."""
    batch, heads = (next((v.shape[dim] for v in vectors if v.shape[dim] != 1), 1) for dim in (0, 1))
    return batch, heads


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of true entries in each row, and the columns, those of true entries first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()


# ---------------------------------------------------------------------------- kernels
@dataclass(frozen=True, slots=True)
class Problem:
    """The arguments of one call of the op, in the form that kernels take."""

    query: Tensor
    key: Tensor
    value: Tensor
    vectors: Sequence[Tensor]
    blocks: Sequence[Tensor]
    mask: str
    scale: float

    def scores(self) -> Iterator[tuple[slice, Tensor]]:
        """Tile by tile: which queries, and their scores [B, G, H/G, rows, Tk], -inf if unseen."""
        query, key = self.query, self.key
        groups, queries, keys = key.shape[1], query.shape[2], key.shape[2]
        columns = at_least_float32(key).unsqueeze(2).transpose(-1, -2)
        for here in _tiles(queries, query.shape[0] * query.shape[1] * keys, _SCORES_AT_ONCE):
            part = torch.unflatten(at_least_float32(query[:, :, here]), 1, (groups, -1))
            seen = _tile(self.mask, self.vectors, here, keys, query.device)
            seen = torch.unflatten(seen, 1, (groups if seen.shape[1] > 1 else 1, -1))
            yield here, (part @ columns * self.scale).masked_fill(~seen, -torch.inf)


#: Of a problem as ``masked_attention``; and of a problem, the gradient, output and logarithm as
#: ``masked_attention_vjp``.
Forward = Callable[[Problem], tuple[Tensor, Tensor]]
Backward = Callable[[Problem, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
_ATTACHED: dict[str, tuple[Forward, Backward]] = {}
_FAST = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_FEATURES = 16


def can_be_fast(query: Tensor, value: Tensor) -> bool:
    """Whether FlexAttention has a kernel for heads like these: else the reference runs."""
    features = min(query.shape[-1], value.shape[-1])
    return query.dtype == value.dtype and query.dtype in _FAST and features >= _LEAST_FEATURES


def attach(device: str, forward: Forward, backward: Backward) -> None:
    """Let a type of device (``"cuda"``) run these instead of the reference, for what
    ``can_be_fast`` says."""
    _ATTACHED[device] = forward, backward


def _kernels(problem: Problem) -> tuple[Forward, Backward] | None:
    query = problem.query
    fast = can_be_fast(query, problem.value) and query.numel() > 0
    return _ATTACHED.get(query.device.type) if fast else None


# ---------------------------------------------------------------------------- forward
@torch.library.custom_op(
    "fxrl::masked_attention",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor[] vectors, Tensor[] blocks, str mask, "
        "float scale) -> (Tensor, Tensor)"
    ),
)
def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: Sequence[Tensor],
    blocks: Sequence[Tensor],
    mask: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention's output, and the logarithm that its backward reads."""
    problem = Problem(query, key, value, vectors, blocks, mask, scale)
    if (kernels := _kernels(problem)) is not None:
        return kernels[0](problem)
    out, lse = _results(query, value)
    for here, scores in problem.scores():
        base = scores.logsumexp(-1)
        part = _weights(scores, base) @ at_least_float32(value).unsqueeze(2)
        out[:, :, here] = part.flatten(1, 2).to(out.dtype)
        lse[:, :, here] = base.flatten(1, 2) / _LN2
    return out, lse


@masked_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _results(query, value)


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    dtype = wide_dtype(query.dtype)
    return out, query.new_empty(batch, heads, queries, dtype=dtype)


def _weights(scores: Tensor, base: Tensor) -> Tensor:
    """The softmax, of which ``base`` is the logarithm of the sum; zeros where nothing is seen."""
    base = base.unsqueeze(-1)
    return (scores - base).exp().masked_fill(base == -torch.inf, 0.0)


# ---------------------------------------------------------------------------- backward
@torch.library.custom_op(
    "fxrl::masked_attention_vjp",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        "Tensor[] vectors, Tensor[] blocks, str mask, float scale) -> (Tensor, Tensor, Tensor)"
    ),
)
def masked_attention_vjp(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    vectors: Sequence[Tensor],
    blocks: Sequence[Tensor],
    mask: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; of padding too: what sees nothing gives zeros."""
    problem = Problem(query, key, value, vectors, blocks, mask, scale)
    if (kernels := _kernels(problem)) is not None:
        return kernels[1](problem, grad, out, lse)
    results = tuple(_laid_out(x) for x in (query, key, value))
    grad, wide_query, columns, values = map(at_least_float32, (grad, query, key, value))
    columns, values = columns.unsqueeze(2), values.unsqueeze(2)
    sums = [torch.zeros_like(x.squeeze(2)) for x in (columns, values)]
    row_sums = (grad * out).sum(-1, keepdim=True)
    for here, scores in problem.scores():
        given, asked, less, base = (
            torch.unflatten(x[:, :, here], 1, (key.shape[1], -1))
            for x in (grad, wide_query, row_sums, lse * _LN2)
        )
        weights = _weights(scores, base)
        pulled = weights * (given @ values.transpose(-1, -2) - less) * scale
        results[0][:, :, here] = (pulled @ columns).flatten(1, 2).to(query.dtype)
        sums[0] += (pulled.transpose(-1, -2) @ asked).sum(2)
        sums[1] += (weights.transpose(-1, -2) @ given).sum(2)
    results[1].copy_(sums[0])
    results[2].copy_(sums[1])
    return results[0], results[1], results[2]


@masked_attention_vjp.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _laid_out(query), _laid_out(key), _laid_out(value)


def _laid_out(x: Tensor) -> Tensor:
    """Memory for a gradient: heads behind tokens, as the products before attention made it."""
    batch, heads, tokens, features = x.shape
    return x.new_empty(batch, tokens, heads, features).transpose(1, 2)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, vectors, blocks, ctx.mask, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.counts = len(vectors), len(blocks)
    ctx.save_for_backward(query, key, value, out, lse, *vectors, *blocks)


def _from_context(ctx: Any, grad: Tensor | None, _: Any) -> Any:
    query, key, value, out, lse, *rest = ctx.saved_tensors
    vectors, blocks = ctx.counts
    given = torch.zeros_like(out) if grad is None else grad
    found = torch.ops.fxrl.masked_attention_vjp(
        given, query, key, value, out, lse, rest[:vectors], rest[vectors:], ctx.mask, ctx.scale
    )
    return *found, [None] * vectors, [None] * blocks, None, None


masked_attention.register_autograd(_from_context, setup_context=_setup_context)
no_second_derivative(masked_attention_vjp)
