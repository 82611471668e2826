"""A sequence shared by ranks: what a rank holds of it, and the collectives between ranks.

    whole         [B, T, H]             equal on all P ranks, as is its gradient
    shared        [B, t, H]             t = ceil(T / P); rank r holds tokens r t to (r + 1) t - 1
    by heads      [B, heads / P, T, D]  all tokens of a rank's own heads (Ulysses, arXiv 2309.14509)

======================== ================= ============ ==========================================
op                       from -> to        sends        its vjp
======================== ================= ============ ==========================================
``fxrl::shard_tokens``   whole -> shared   nothing      ``gather_tokens``
``fxrl::gather_tokens``  shared -> whole   all-gather   ``shard_tokens``: a rank's own part
``fxrl::seq_to_head``    shared -> heads   all-to-all   ``head_to_seq``
``fxrl::head_to_seq``    heads -> shared   all-to-all   ``seq_to_head``
``fxrl::sum_gradients``  whole -> whole    nothing      all-reduce: the sum of what each rank found
======================== ================= ============ ==========================================

NOTE [One convention of gradients]: the gradient of a whole value is whole and equal on all ranks,
that of a shared value is a rank's own part of it. So a gathered value hands each rank its part back
(no sum: every rank has computed the same gradient), and whatever enters the shared part as a whole,
weights above all, passes ``sum_gradients``, behind which gradients are partial.

NOTE [What stands beyond the end]: T need not be a multiple of P. Places without a token hold copies
of the nearest one, which are as finite as what they copy, and zeros where attention ends. Nobody
reads what is made of them, so their gradients are zeros: they add nothing to those of weights.

NOTE [Why collectives may stand in pure ops]: every rank compiles the same graph for the same sizes,
so what AOTAutograd or a cut drops, merges or runs again is the same everywhere, and the order in
which a graph runs is that of its data. None stands under control flow that depends on data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxrl.distributed import sum_into
from fxrl.errors import ConfigError, FxrlError
from fxrl.ir.graph import Size
from fxrl.ir.sizes import share_of
from fxrl.ops import no_second_derivative
from fxrl.ops.checksum import checksum

dist: Any = torch.distributed  # much of it has no types
_library: Any = torch.library
T = TypeVar("T")
_GROUPS: dict[int, Any] = {}
#: Its name since torch 2.13, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---------------------------------------------------------------------------- the ranks
def join_group(ranks: int, timeout: timedelta | None = None) -> None:
    """Make the process groups of ``ranks`` consecutive processes; all processes call it, any number
    of times. ``timeout`` of their collectives: None is the backend's."""
    if ranks == 1:
        return
    asked = f"context_parallel={ranks}"
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{asked} needs {ranks} processes that know each other: start them by "
            f"torchrun --nproc-per-node {ranks}, and call torch.distributed.init_process_group() "
            "before the first step"
        )
    world = dist.get_world_size()
    if world % ranks:
        raise ConfigError(
            f"{asked} does not divide the {world} processes that run; start a multiple of {ranks}"
        )
    known = _GROUPS.get(ranks)
    if known is None or known[0] is not dist.group.WORLD:  # a group ends with what it is part of
        # One of its own, be it all processes': who fails leaves it, and can still speak to others.
        _GROUPS[ranks] = (dist.group.WORLD, dist.new_subgroups(ranks, timeout=timeout)[0])


def leave_groups() -> None:
    """Ends gloo's groups: whoever waits in a collective of theirs for this process has an error.

    NCCL's stay, as to end them may wait for what is on its way; there the others' time runs out.
    """
    for world, group in _GROUPS.values():
        if world is dist.group.WORLD and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
    _GROUPS.clear()


def told_by_ranks(value: Any, ranks: int) -> list[Any]:
    """Gather the values of all ranks of this one's group; all of them call it, with what can be
    pickled."""
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, value, group=_group(ranks))
    return told


def told_by_first(make: Callable[[], T], inputs: str, ranks: int) -> T:
    """The result of ``make`` on the first rank of this group, or its exception; all of the ranks
    call it, with the same ``inputs``: a text of what ``make`` depends on."""
    made: Any = None
    if dist.get_rank(_group(ranks)) == 0:
        try:
            made = make()
        except FxrlError as error:
            made = error
        except Exception as error:  # raised on every rank, so it must be one that can be sent
            made = RuntimeError(f"{type(error).__name__}: {error}")
    each = told_by_ranks((hashlib.sha256(inputs.encode()).hexdigest(), made), ranks)
    (expected, first), *others = each
    if differing := [rank for rank, (own, _) in enumerate(others, 1) if own != expected]:
        texts = told_by_ranks(inputs, ranks)
        raise FxrlError(
            f"ranks {[0, *differing]} of {ranks} that share sequences have captured different "
            f"graphs: {_first_difference(texts[0], texts[differing[0]])}; give them the same "
            "model, loss, batch, packages and kind of GPU"
        )
    if isinstance(first, Exception):
        raise first
    return first  # type: ignore[no-any-return]


def _first_difference(one: str, other: str) -> str:
    """The first line that two texts do not share, as both have it."""
    lines = zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing")
    return next(f"{a.strip()!r} is {b.strip()!r} elsewhere" for a, b in lines if a != b)


def check_same(kind: str, told: dict[str, Any], ranks: int) -> None:
    """Raises where the ranks of this one's group differ in what they must have alike.

    Args:
        kind: what it is, in words.
        told: of each part, by name, what tells it from others.
    """
    first, *others = told_by_ranks(told, ranks)
    for rank, other in enumerate(others, 1):
        differing = [name for name in first | other if first.get(name) != other.get(name)]
        if differing:
            raise FxrlError(
                f"ranks 0 and {rank} of {ranks} that share sequences have different {kind}: "
                f"{', '.join(differing[:3])}; {_CURES[kind]}"
            )


_CURES = {
    "batches": "give all ranks of a group the same whole batch: deal out by "
    "torch.distributed.get_rank() // context_parallel",
    "weights": "seed every process alike before the model and its adapters are made, or load or "
    "broadcast what one has",
}


def signs_of_batch(batch: Any) -> dict[str, Any]:
    """What tells a batch from others, by the path of each leaf. Of floats only shapes do: what a
    model has scored may be rounded otherwise on another card, and token ids tell batches apart."""
    whole = dict(batch) if isinstance(batch, Mapping) else batch
    leaves, _ = pytree.tree_flatten_with_path(whole)
    return {f"batch{pytree.keystr(path)}": _sign(leaf) for path, leaf in leaves}


def signs_of_weights(model: nn.Module) -> dict[str, Any]:
    """What tells weights from others, by name."""
    return {name: (_kind(p), checksum(p.detach())) for name, p in model.named_parameters()}


def _sign(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        plain = isinstance(leaf, bool | int | float | str | None)
        return repr(leaf) if plain else type(leaf).__name__
    exact = not (leaf.is_floating_point() or leaf.is_complex())
    return (_kind(leaf), checksum(leaf) if exact else None)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _group(ranks: int) -> Any:
    assert ranks in _GROUPS, f"join_group({ranks}) comes first"
    return _GROUPS[ranks][1]


# ---------------------------------------------------------------------------- whole <-> shared
def _parted(x: Tensor, dim: int, outer: Size, inner: Size) -> tuple[Tensor, int]:
    """``x`` with dim ``dim`` as three, of which the middle one counts tokens; where that one is."""
    shape = x.shape
    middle = shape[dim] // (outer * inner)
    return x.reshape(*shape[:dim], outer, middle, inner, *shape[dim + 1 :]), dim + 1


def _resized(x: Tensor, dim: int, size: Size) -> list[Size]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


@torch.library.custom_op(
    "fxrl::shard_tokens",
    mutates_args=(),
    schema=(
        "(Tensor x, int dim, SymInt outer, SymInt inner, SymInt start, SymInt local, bool copies, "
        "int ranks) -> Tensor"
    ),
)
def shard_tokens(
    x: Tensor, dim: int, outer: int, inner: int, start: int, local: int, copies: bool, ranks: int
) -> Tensor:
    """A rank's part of a whole value, whose dim ``dim`` has ``outer * length * inner`` entries, the
    first of them for token ``start``; the part has ``outer * local * inner``.

    Where there is no entry the nearest one's copy stands if ``copies``, else zeros.
    """
    parted, at = _parted(x, dim, outer, inner)
    length = parted.shape[at]
    first = dist.get_rank(_group(ranks)) * local - start
    places = torch.arange(first, first + local, device=x.device)
    found = parted.index_select(at, places.clamp(0, length - 1))
    if not copies:
        beyond = (places < 0) | (places >= length)
        found = found.movedim(at, -1).masked_fill(beyond, 0).movedim(-1, at)
    return found.reshape(_resized(x, dim, outer * local * inner)).contiguous()


@shard_tokens.register_fake
def _(x: Tensor, dim: int, outer: Size, inner: Size, start: Size, local: Size, *_: Any) -> Tensor:
    return x.new_empty(_resized(x, dim, outer * local * inner))


@torch.library.custom_op(
    "fxrl::gather_tokens",
    mutates_args=(),
    schema=(
        "(Tensor x, int dim, SymInt outer, SymInt inner, SymInt start, SymInt length, int ranks) "
        "-> Tensor"
    ),
)
def gather_tokens(
    x: Tensor, dim: int, outer: int, inner: int, start: int, length: int, ranks: int
) -> Tensor:
    """The whole of a shared value ``x``, whose dim ``dim`` has ``outer * local * inner`` entries:
    ``length`` tokens, the first of them number ``start``."""
    part, at = _parted(x, dim, outer, inner)
    part = part.contiguous()
    parts = x.new_empty(ranks, *part.shape)
    _all_gather(parts.view(-1), part.view(-1), group=_group(ranks))
    tokens = parts.movedim(0, at).flatten(at, at + 1).narrow(at, start, length)
    return tokens.reshape(_resized(x, dim, outer * length * inner)).contiguous()


@gather_tokens.register_fake
def _(
    x: Tensor, dim: int, outer: Size, inner: Size, start: Size, length: Size, ranks: int
) -> Tensor:
    return x.new_empty(_resized(x, dim, outer * length * inner))


def _place_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, dim, outer, inner, start, *_, ctx.ranks = inputs
    ctx.place = (dim, outer, inner, start, x.shape[dim] // (outer * inner))


def _shard_vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    whole = torch.ops.fxrl.gather_tokens(grad, *ctx.place, ctx.ranks)
    return whole, None, None, None, None, None, None, None


def _gather_vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    part = torch.ops.fxrl.shard_tokens(grad, *ctx.place, False, ctx.ranks)
    return part, None, None, None, None, None, None


shard_tokens.register_autograd(_shard_vjp, setup_context=_place_context)
gather_tokens.register_autograd(_gather_vjp, setup_context=_place_context)


# ---------------------------------------------------------------------------- shared <-> by heads
# NOTE [What an exchange takes]: E bytes are exchanged, as many as the shared values have. What is
# sent and what comes lie side by side, 2 E; then what came and the results, which are no larger.
# So an op takes 2 E at a time, its results included (``planner.memory_profile`` counts on it).
_EXCHANGE = "(Tensor[] x, Tensor tokens, int ranks) -> Tensor[]"


@torch.library.custom_op("fxrl::seq_to_head", mutates_args=(), schema=_EXCHANGE)
def seq_to_head(x: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    """From a rank's tokens of all heads, [B, heads, t, D] each and of one dtype, to all tokens of
    its heads, [B, heads / ranks, T, D] each and contiguous, in one all-to-all. ``ranks`` divides
    the numbers of heads; T is the last size of ``tokens``, of which nothing else counts."""
    sizes = [(b, heads // ranks, local, d) for b, heads, local, d in (part.shape for part in x)]
    pieces = [torch.unflatten(part, 1, (ranks, -1)).unbind(1) for part in x]
    got = _exchanged(pieces, sizes, ranks)
    results = _by_heads(x, tokens, ranks)
    for whole, part, size in zip(results, got, sizes, strict=True):
        for place, piece in zip(torch.split(whole, size[2], 2), part, strict=False):
            place.copy_(piece[:, :, : place.shape[2]])
    return results


@torch.library.custom_op("fxrl::head_to_seq", mutates_args=(), schema=_EXCHANGE)
def head_to_seq(x: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    """From all tokens of a rank's heads, [B, heads / ranks, T, D] each and of one dtype, to its
    tokens of all heads, [B, heads, t, D] each, in memory [B, t, heads, D], with zeros beyond the
    last token; in one all-to-all. ``tokens`` as in ``seq_to_head``."""
    local = int(share_of(tokens.shape[-1], ranks))
    sizes = [(b, heads, local, d) for b, heads, _, d in (whole.shape for whole in x)]
    got = _exchanged([torch.split(whole, local, 2) for whole in x], sizes, ranks)
    results = _by_tokens(x, tokens, ranks)
    for result, part in zip(results, got, strict=True):
        torch.unflatten(result, 1, (ranks, -1)).copy_(part.transpose(0, 1))
    return results


_Sizes = Sequence[tuple[int, int, int, int]]


def _exchanged(x: Sequence[Sequence[Tensor]], sizes: _Sizes, ranks: int) -> list[Tensor]:
    """Piece r of each of ``x`` goes to rank r; [ranks, *size] of each comes back, a piece of its
    rank's from each."""
    sent = _laid_out(x, sizes, ranks)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=_group(ranks))
    return _parts(got, sizes)


def _laid_out(x: Sequence[Sequence[Tensor]], sizes: _Sizes, ranks: int) -> Tensor:
    """Row r holds piece r of each, with zeros where that has fewer tokens than ``sizes`` says."""
    flat = x[0][0].new_empty(ranks, sum(map(prod, sizes)))
    for pieces, part in zip(x, _parts(flat, sizes), strict=True):
        for piece, place in zip_longest(pieces, part):
            held = 0 if piece is None else piece.shape[2]
            place[:, :, held:] = 0
            if held:
                place[:, :, :held] = piece
    return flat


def _parts(flat: Tensor, sizes: _Sizes) -> list[Tensor]:
    """[ranks, *size] for each size, of the rows of ``flat``."""
    parts = torch.split(flat, [*map(prod, sizes)], 1)
    return [torch.unflatten(part, 1, size) for part, size in zip(parts, sizes, strict=True)]


def _by_heads(x: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    return [
        part.new_empty(part.shape[0], part.shape[1] // ranks, tokens.shape[-1], part.shape[3])
        for part in x
    ]


def _by_tokens(x: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    local = share_of(tokens.shape[-1], ranks)
    return [
        whole.new_empty(whole.shape[0], local, whole.shape[1] * ranks, whole.shape[3]).transpose(
            1, 2
        )
        for whole in x
    ]


seq_to_head.register_fake(_by_heads)
head_to_seq.register_fake(_by_tokens)


def _exchange_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    _, tokens, ctx.ranks = inputs
    ctx.save_for_backward(tokens)


def _seq_to_head_vjp(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return torch.ops.fxrl.head_to_seq(grads, *ctx.saved_tensors, ctx.ranks), None, None


def _head_to_seq_vjp(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return torch.ops.fxrl.seq_to_head(grads, *ctx.saved_tensors, ctx.ranks), None, None


seq_to_head.register_autograd(_seq_to_head_vjp, setup_context=_exchange_context)
head_to_seq.register_autograd(_head_to_seq_vjp, setup_context=_exchange_context)


# ---------------------------------------------------------------------------- gradients of weights
@torch.library.custom_op(
    "fxrl::sum_over_ranks", mutates_args=(), schema="(Tensor[] x, int ranks) -> Tensor[]"
)
def sum_over_ranks(x: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Sums over the ranks, made in float32 or wider."""
    sums = [torch.empty_like(part) for part in x]
    sum_into(sums, x, partial(dist.all_reduce, group=_group(ranks)))
    return sums


@sum_over_ranks.register_fake
def _(x: Sequence[Tensor], ranks: int) -> list[Tensor]:
    return [torch.empty_like(part) for part in x]


no_second_derivative(sum_over_ranks)

_LIBRARY = _library.Library("fxrl", "FRAGMENT")
_LIBRARY.define("sum_gradients(Tensor(a)[] x, int ranks) -> Tensor(a)[]")


class _SumGradients(torch.autograd.Function):
    """Autograd runs its backward when it has the gradients of all that was given: one bucket."""

    @staticmethod
    def forward(ctx: Any, ranks: int, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = [grad for grad in grads if grad is not None]  # the same ones on every rank
        sums = iter(torch.ops.fxrl.sum_over_ranks(found, ctx.ranks) if found else ())
        return None, *(None if grad is None else next(sums) for grad in grads)


def _sum_gradients(x: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """The same values for the shared part; see NOTE [One convention of gradients].

    A view each and no copy, which an op made by ``custom_op`` may not return.
    """
    return list(_SumGradients.apply(ranks, *x))  # type: ignore[no-untyped-call]


def _views(x: Sequence[Tensor], ranks: int) -> list[Tensor]:
    return [one.view_as(one) for one in x]


_LIBRARY.impl("sum_gradients", _sum_gradients, "Autograd")
_LIBRARY.impl("sum_gradients", _views, "CompositeExplicitAutograd")
