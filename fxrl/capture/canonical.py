"""One spelling for what a lowered graph can say in several, so that rows are seen through it.

Functional ATen says the same sizes and rows in forms between which nothing but a guard, or a check
at each call, can tell: a count of entries or the product of sizes, ``x[:-1]`` as long as
``Max(0, u - 1)`` or ``u - 1``, a gather of as many tokens as its source has or of fewer.
"""

from __future__ import annotations

import operator
import sys
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import fx

from fxrl.capture._torch import GuardOnDataDependentSymNode, equate
from fxrl.capture.checks import check
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    RESHAPES,
    HigherOrderOperator,
    as_node,
    base_of,
    bound,
    eliminate_dead_code,
    has_hint,
    hint,
    is_call,
    needs_grad,
    shape_of,
    val_of,
)
from fxrl.ir.remark import Refusal
from fxrl.ir.source import user_source

aten = torch.ops.aten


def canonicalize(graph: fx.Graph) -> None:
    """Spell sizes and rows of a lowered graph in one way, and leave out what nobody reads.

    Runs in the fake mode of the trace. Sizes that are only equal by Dynamo's guards add guards.
    """
    _forget_offsets(graph)
    _index_strided(graph)
    _spell_numels(graph)
    _settle_slices(graph)
    _size_fills(graph)
    _size_draws(graph)
    _rejoin_rows(graph)
    _index_gathered_rows(graph)
    eliminate_dead_code(graph)
    _equate_gathers(graph)


def _forget_offsets(graph: fx.Graph) -> None:
    """Erase the checks that a slice between numbers of a tensor begins at no negative place: no
    slice does, and each keeps all that it was taken from."""
    for offset in graph.find_nodes(op="call_function", target=aten.sym_storage_offset.default):
        for compared in list(offset.users):
            if set(compared.users) and all(
                is_call(u, aten._assert_scalar.default) for u in compared.users
            ):
                for asserted in list(compared.users):
                    graph.erase_node(asserted)


def _index_strided(graph: fx.Graph) -> None:
    """Let ``as_strided`` of a value, and what is written through it (as ``fill_diagonal_`` does),
    take entries by their places.

    A rewritten value may lie in memory otherwise than the traced one, and as the gradient of
    ``as_strided_scatter`` PyTorch (2.11 to 2.15) keeps that of the entries which are overwritten.
    """
    builder = Builder(graph)
    for node in list(graph.nodes):
        writes = is_call(node, aten.as_strided_scatter.default)
        if not writes and not is_call(node, aten.as_strided.default):
            continue
        value = as_node(node.args[0])
        if base_of(value).op == "placeholder" and not (writes and needs_grad(value)):
            continue  # it lies as the user's code has it
        size, stride, offset = (bound(node)[name] for name in ("size", "stride", "storage_offset"))
        order = _order_in_memory(value, node)
        with builder.before(node):
            laid = builder.call(aten.permute.default, value, order)
            flat = builder.call(aten.reshape.default, laid, [-1])
            device = val_of(value).device
            places = builder.call(aten.arange.default, _numel(builder, value), device=device)
            places = builder.call(aten.as_strided.default, places, size, stride, offset or 0)
            places = builder.call(aten.reshape.default, places, [-1])
            if writes:
                src = builder.call(aten.reshape.default, node.args[1], [-1])
                made = builder.call(aten.scatter.src, flat, 0, places, src)
                sizes = _sizes(builder, value)
                made = builder.call(aten.reshape.default, made, [sizes[dim] for dim in order])
                back = sorted(range(len(order)), key=order.__getitem__)
                made = builder.call(aten.permute.default, made, back)
            else:
                made = builder.call(aten.index_select.default, flat, 0, places)
                made = builder.call(aten.reshape.default, made, size)
            node.replace_all_uses_with(made)
        graph.erase_node(node)


def _order_in_memory(value: fx.Node, node: fx.Node) -> list[int]:
    """A value's dims, the one first whose entries lie farthest apart.

    Raises:
        Refusal: others lie between its entries, or ahead of them.
    """
    val = val_of(value)
    strides = val.stride()
    order = sorted(range(val.dim()), key=lambda dim: -hint(strides[dim]))
    if val.storage_offset() != 0 or not val.permute(order).is_contiguous():
        reason = "as_strided of a view, which may reach what the view does not show"
        raise Refusal(reason, "index it, or take a contiguous copy first", node)
    return order


def _spell_numels(graph: fx.Graph) -> None:
    """Let how many entries a tensor has be the product of its sizes, which rows can follow."""
    builder = Builder(graph)
    for node in graph.find_nodes(op="call_function", target=aten.sym_numel.default):
        with builder.before(node):
            node.replace_all_uses_with(_numel(builder, as_node(node.args[0])))
        graph.erase_node(node)


def _numel(builder: Builder, tensor: fx.Node) -> fx.Node:
    sizes = (builder.call(aten.sym_size.int, tensor, dim) for dim in range(len(shape_of(tensor))))
    return reduce(partial(builder.call, operator.mul), sizes)


def _settle_slices(graph: fx.Graph) -> None:
    """Let ``x[:-1]`` and ``x[1:]`` of a sequence as long as data says have ``u - 1`` entries.

    Fake tensors have ``Max(0, u - 1)`` and ``Max(0, u - Min(1, u))``, which nothing shows to be
    equal. All are ``u - 1`` where there is an entry to leave out, which is checked: a call with an
    empty sequence runs as it was written.
    """
    builder = Builder(graph)
    was: dict[fx.Node, Any] = {}
    checked: set[str] = set()
    numbers: dict[str, fx.Node] = {}  # sizes that the graph holds; a tensor that is asked stays
    for node in list(graph.nodes):
        if isinstance(node.meta.get("val"), torch.SymInt):
            numbers.setdefault(str(node.meta["val"]), node)
        if (left_out := _left_out(node)) is not None:
            dim, count = left_out
            source = cast(fx.Node, node.args[0])
            sizes = list(shape_of(node))
            sizes[dim] = shape_of(source)[dim] - count
            with builder.before(node):
                if (told := str(sizes[dim])) not in checked:
                    size = numbers.get(str(shape_of(source)[dim]))
                    size = size or builder.call(aten.sym_size.int, source, dim)
                    enough = builder.call(operator.ge, size, count)
                    _check_size(builder, enough, node)
                    checked.add(told)
            was[node] = val_of(node)
            node.meta["val"] = val_of(node).new_empty_strided(sizes, val_of(node).stride())
        elif isinstance(node.target, HigherOrderOperator):
            continue  # its body was traced with the sizes as they are spelled
        elif node.op == "call_function" and not was.keys().isdisjoint(node.all_input_nodes):
            was[node] = node.meta.get("val")
            try:
                builder.update(node)
            except GuardOnDataDependentSymNode:  # it wants a size as it was spelled
                for changed, val in was.items():
                    changed.meta["val"] = val
                return


def _left_out(node: fx.Node) -> tuple[int, int] | None:
    """The dim and how many entries of it a slice leaves out, of as many as data says."""
    if not is_call(node, aten.slice.Tensor):
        return None
    given = bound(node)
    sizes, start, end = shape_of(given["self"]), given["start"] or 0, given["end"]
    end = sys.maxsize if end is None else end
    dim = given["dim"] % len(sizes)
    if has_hint(sizes[dim]) or given["step"] != 1:
        return None
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    count = start - min(end, 0)
    goes_on = start >= 0 and (end < 0 or end == sys.maxsize)
    return (dim, count) if goes_on and count else None


def _size_fills(graph: fx.Graph) -> None:
    """Let ``zeros_like(logits[0, 0])``, of one row that stands for all, say its sizes: else it is
    taken for one more value of that row."""
    builder = Builder(graph)
    for node in graph.nodes:
        if not is_call(node, *_FILLS) or not is_call(row := node.args[0], aten.select.int):
            continue
        if (val := val_of(node)).is_contiguous():
            with builder.before(node):
                fill = bound(node).get("fill_value", _FILLS[node.target])
                kind = {"dtype": val.dtype, "device": val.device}
                sizes = _sizes(builder, as_node(row))
                node.replace_all_uses_with(builder.call(aten.full.default, sizes, fill, **kind))


def _sizes(builder: Builder, tensor: fx.Node) -> list[Any]:
    return [
        size if isinstance(size, int) else builder.call(aten.sym_size.int, tensor, dim)
        for dim, size in enumerate(shape_of(tensor))
    ]


_FILLS: dict[Any, int] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: 0,
}


def _size_draws(graph: fx.Graph) -> None:
    """Let ``rand_like(logits)`` and ``empty_like(logits).exponential_()`` say the sizes that they
    have: nothing else of the logits comes into what they draw."""
    builder = Builder(graph)
    for node in list(graph.nodes):
        blank = is_call(node, aten.empty_like.default) and any(
            is_call(user, *_OVERWRITING) for user in node.users
        )
        made = aten.empty.memory_format if blank else _DRAWS.get(node.target)
        if made is None or not (val := val_of(node)).is_contiguous():
            continue
        with builder.before(node):
            kind = {"dtype": val.dtype, "device": val.device}
            drawn = builder.call(made, _sizes(builder, as_node(node.args[0])), **kind)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)  # or it would draw as well


_DRAWS: dict[Any, Any] = {
    aten.rand_like.default: aten.rand.default,
    aten.randn_like.default: aten.randn.default,
}
#: Draws in place, of which nothing is left of what they are given.
_OVERWRITING = tuple(
    getattr(aten, name).default
    for name in ("exponential", "normal_functional", "uniform", "cauchy", "log_normal", "geometric")
)


def _rejoin_rows(graph: fx.Graph) -> None:
    """Let ``x.view(-1).view(n, V)`` look at ``x``: what was laid flat between had rows before."""
    builder = Builder(graph)
    for node in list(graph.nodes):
        flat = node.args[0] if is_call(node, *RESHAPES) else None
        if not is_call(flat, *RESHAPES) or len(shape_of(flat)) != 1:
            continue
        source = as_node(flat.args[0])
        node.update_arg(0, source)
        for reader in [user for user in flat.users if is_call(user, aten.sym_size.int)]:
            with builder.before(reader):
                reader.replace_all_uses_with(_numel(builder, source))


def _index_gathered_rows(graph: fx.Graph) -> None:
    """Spell ``x.gather(1, at[..., None].expand(-1, -1, V))``, which takes whole rows, as indexing;
    ``repeat`` does for ``expand``.

    A gather raises at negative positions, which indexing counts from the end: here these are none.
    """
    builder = Builder(graph)
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        source, index, dim = (bound(node)[name] for name in ("self", "index", "dim"))
        rank = len(shape_of(source))
        dim %= rank
        if not _is_spread(index) or not _takes_rows(source, index, dim):
            continue
        with builder.before(node):
            at = bound(index)["self"]
            for _ in range(dim + 1, rank):
                at = builder.call(aten.select.int, at, -1, 0)
            negative = builder.call(aten.lt.Scalar, at, 0)
            at = builder.call(aten.masked_fill.Scalar, at, negative, _NOWHERE)
            places = [_all_of(builder, index, d, dim) for d in range(dim)]
            rows = builder.call(aten.index.Tensor, source, [*places, at])
            node.replace_all_uses_with(rows)
        graph.erase_node(node)


def _is_spread(index: fx.Node) -> bool:
    """Whether it is a value of its rank whose dims of size 1 were expanded, or repeated."""
    if is_call(index, aten.repeat.default):
        given, made = shape_of(as_node(bound(index)["self"])), shape_of(index)
        pairs = zip(given, made, strict=True) if len(given) == len(made) else [(2, 3)]
        return all(
            (isinstance(one, int) and one == 1) or (has_hint(one, other) and bool(one == other))
            for one, other in pairs
        )
    return is_call(index, aten.expand.default)


_NOWHERE = 2**62  # a position that no tensor has


def _takes_rows(source: fx.Node, index: fx.Node, dim: int) -> bool:
    """Whether an expanded index has one position for all that is behind ``dim``, which it takes
    whole, of each that is before."""
    sizes, taken, given = map(shape_of, (source, index, bound(index)["self"]))
    whole = [pair for d, pair in enumerate(zip(sizes, taken, strict=True)) if d != dim]
    return (
        dim + 1 < len(sizes) == len(given)
        and all(isinstance(size, int) and size == 1 for size in given[dim + 1 :])
        and all(has_hint(*pair) and bool(pair[0] == pair[1]) for pair in whole)
    )


def _all_of(builder: Builder, index: fx.Node, dim: int, last: int) -> fx.Node:
    """Every position of ``dim``, as broadcast with those of the dims up to ``last``."""
    size, device = builder.call(aten.sym_size.int, index, dim), val_of(index).device
    place = builder.call(aten.arange.default, size, device=device)
    for _ in range(dim, last):
        place = builder.call(aten.unsqueeze.default, place, -1)
    return place


def _equate_gathers(graph: fx.Graph) -> None:
    """Let a gather's index have exactly the tokens of what it reads, where it does now.

    NOTE [Why a guard]: gather accepts a shorter index, so ``[s0, s1, V]`` gathered by ``[s2, s3,
    1]`` says nothing about the sizes. Row programs need to know; the comparison becomes one of
    Dynamo's guards, and a batch that breaks it is captured anew. Sizes that are read off tensors,
    such as those of ``logits[start : end - 1]`` and ``ids[start + 1 : end]``, are known at each
    call alone: there a check compares them, and where it fails the call runs as it was written.
    """
    builder = Builder(graph)
    for node in graph.nodes:
        if not is_call(node, aten.gather.default):
            continue
        source, dim, index = cast(tuple[fx.Node, int, fx.Node], node.args)
        sizes, others = shape_of(source), shape_of(index)
        for d, (left, right) in enumerate(zip(sizes, others, strict=True)):
            if d == dim % len(sizes):
                continue
            if has_hint(left, right):
                bool(left == right)
            elif str(left) != str(right) and equate(left, right):
                with builder.before(node):
                    parts = (builder.call(aten.sym_size.int, one, d) for one in (source, index))
                    same = builder.call(operator.eq, *parts)
                    _check_size(builder, same, node)


def _check_size(builder: Builder, holds: fx.Node, node: fx.Node) -> None:
    """Run the call as written where what ``node`` takes for granted does not hold."""
    builder.call(check, builder.call(aten.scalar_tensor.default, holds), None, user_source(node))
