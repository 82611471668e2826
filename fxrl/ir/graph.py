"""Small, total helpers over ``torch.fx`` values and calls that carry ``meta["val"]``."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = int | torch.SymInt

#: The types of graph targets: one ATen overload, and an op with a graph for a body.
OpOverload = type(torch.ops.aten.mm.default)
HigherOrderOperator = type(torch.ops.higher_order.cond).__mro__[1]

aten = torch.ops.aten
#: Calls that give the same values in order under another shape.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
#: Calls that only reorder dims.
TRANSPOSES = (aten.permute.default, aten.transpose.int, aten.t.default)
#: Calls that give the same values under the same shape, maybe in another dtype.
COPIES = (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
#: Products of rows with a matrix.
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default)
#: Calls that contract a feature dim; what separates one layer from the next.
PRODUCTS = (*MATRIX_PRODUCTS, aten.bmm.default, aten.baddbmm.default)

#: Products with weights that are quantised, or of which ranks have parts (``fxrl.ops``), and the
#: quantiser of rows, by name: they are defined above this.
FP8_LINEAR, DEQUANTIZED_MM = "fxrl.fp8_linear.default", "fxrl.dequantized_mm.default"
SHARDED_MM, SHARDED_ROWS = "fxrl.sharded_mm.default", "fxrl.sharded_rows.default"
SCALED_MM = "fxrl.scaled_mm.default"
QUANTIZED_PRODUCTS = (FP8_LINEAR, DEQUANTIZED_MM, SHARDED_MM)
#: Those of them whose weight can be read in pieces, and lookups of its rows.
PIECEWISE_PRODUCTS = (DEQUANTIZED_MM, SHARDED_MM)
PIECEWISE_ROWS = ("fxrl.dequantized_rows.default", SHARDED_ROWS)
#: Lookups in a table, and in one that takes no GPU memory.
EMBEDDING, HOST_ROWS = "aten.embedding.default", "fxrl.host_rows.default"
QUANTIZE_ROWS = "fxrl.quantize_rows.default"
#: From tokens to heads and back, among ranks that share a sequence.
EXCHANGES = ("fxrl.seq_to_head.default", "fxrl.head_to_seq.default")
#: The loss head, and that over a head which is read in pieces.
LOSS_HEADS = "fxrl.linear_logprob.default", "fxrl.piecewise_logprob.default"
#: In the ``meta`` of a graph that a break ends or comes before: why is the break's own remark.
IS_PART = "holds_a_part_of_the_loss"


def is_embedding(node: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` looks rows up in a table of weights."""
    return isinstance(node, fx.Node) and str(node.target) in (
        EMBEDDING,
        HOST_ROWS,
        *PIECEWISE_ROWS,
    )


def is_loss_head(node: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` calls the fused loss head, over a head in memory or one read in pieces."""
    return isinstance(node, fx.Node) and str(node.target) in LOSS_HEADS


def is_quantized_product(call: Any) -> bool:
    """Whether a call (a node, or anything with a target) multiplies rows by a weight that is
    quantised or sharded."""
    return str(call.target) in QUANTIZED_PRODUCTS


def is_piecewise_product(call: Any) -> bool:
    """Whether its weight can be read in pieces: it is sharded, or dequantised where it is read."""
    return str(call.target) in PIECEWISE_PRODUCTS


def is_call(node: object, *targets: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` is a call of one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_grouped_product(node: object) -> bool:
    """Whether ``node`` multiplies rows by the matrix of their group (experts): torch's op, or a
    library's of the same name."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    name = str(node.target)
    return "grouped_mm" in name and "scaled" not in name  # that reads values in FP8


def is_matrix_product(call: fx.Node) -> bool:
    """Whether a call is a product in the dtype of its rows."""
    own = call.target in PRODUCTS or is_grouped_product(call) or is_piecewise_product(call)
    return own or library_weight(call) is not None


def library_weight(call: fx.Node) -> fx.Node | None:
    """The weight by which a library's op multiplies rows, as bitsandbytes' does that read 4 bits.

    Told by its operands, for such ops have no formula: of rows of K values it makes rows of N, and
    one of the graph's inputs has 1 to 32 bits for each of N x K values.
    """
    given = call.all_input_nodes if is_library_op(call.target) else []
    if len(given) < 2 or not is_tensor(call) or not is_tensor(given[0]):
        return None
    made, rows = val_of(call), val_of(given[0])
    floats = made.is_floating_point() and rows.is_floating_point()
    if not floats or not equal_shapes(made.shape[:-1], rows.shape[:-1]):
        return None
    count = hint(made.shape[-1]) * hint(rows.shape[-1])
    for operand in given[1:]:
        val, given_as = tensor_val(operand), base_of(operand).op
        if val is None or val.dim() > 2 or given_as == "call_function":
            continue  # keys of an attention are computed, and have more dims
        if count <= 8 * numel_hint(operand) * val.element_size() <= 32 * count:
            return operand
    return None


def is_library_op(target: object) -> bool:
    """Whether a call's target is an op that neither PyTorch nor fxrl defines."""
    known = ("aten", "prims", "prim", "fxrl")
    return isinstance(target, OpOverload) and target.namespace not in known


def is_attention(node: fx.Node) -> bool:
    """Whether ``node`` is an attention, PyTorch's or that under a computed mask (``fxrl.ops``): the
    whole op, a kernel of it or its backward."""
    named = ("scaled_dot_product", "masked_attention")
    return node.op == "call_function" and any(name in str(node.target) for name in named)


def is_exchange(call: fx.Node) -> bool:
    """Whether a call sends tokens for heads or back (``fxrl.ops.context_parallel``)."""
    return str(call.target) in EXCHANGES


def maker_of(node: fx.Node) -> fx.Node:
    """The call that made a value, which may be one of its several results."""
    return as_node(node.args[0]) if is_call(node, operator.getitem) else node


def is_view(node: object) -> bool:
    """Whether ``node`` only looks at its operand's memory (or may)."""
    if is_call(node, operator.getitem):
        return is_view(node.args[0])
    if not (isinstance(node, fx.Node) and isinstance(node.target, OpOverload)):
        return False
    return _looks_at_operand(node.target)


@functools.cache  # planning asks for the same ops again and again
def _looks_at_operand(target: Any) -> bool:
    infos = [argument.alias_info for argument in target._schema.arguments]
    return target is aten._unsafe_view.default or any(
        info is not None and not info.is_write for info in infos
    )


def order_of_dims(node: fx.Node) -> list[int]:
    """Of a call of ``TRANSPOSES``, for each dim which one of the operand's it is."""
    given, rank = bound(node), len(shape_of(node))
    order = list(range(rank))
    if is_call(node, aten.permute.default):
        return [dim % rank for dim in given["dims"]]
    if is_call(node, aten.t.default):
        return order[::-1]
    first, second = given["dim0"] % rank, given["dim1"] % rank
    order[first], order[second] = order[second], order[first]
    return order


def swaps_last_dims(node: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` is a call of ``TRANSPOSES`` that swaps the last two dims and no others."""
    if not is_call(node, *TRANSPOSES) or (rank := len(shape_of(node))) < 2:
        return False
    return order_of_dims(node) == [*range(rank - 2), rank - 1, rank - 2]


def is_whole_slice(node: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` is ``x[:]``, of a size that varies; a fixed one gives none."""
    if not is_call(node, aten.slice.Tensor):
        return False
    given = bound(node)
    return not given["start"] and given["end"] == 2**63 - 1 and given["step"] == 1


def skip_whole_slices(node: Any) -> Any:
    """``x`` of ``x[:]``, or of ``x[:][:]``."""
    while is_whole_slice(node):
        node = node.args[0]
    return node


Looks = Callable[[fx.Node], bool]


def readers_of(node: fx.Node, looks: Looks = is_view) -> Iterator[fx.Node]:
    """The nodes that compute with a value or with views of it, without the views themselves."""
    for user in node.users:
        if looks(user):
            yield from readers_of(user, looks)
        else:
            yield user


def share_views(graph: fx.Graph) -> None:
    """Merge equal views, so that products of the same rows read one value, with one gradient."""
    _share(graph, is_view)


def share_repeats(graph: fx.Graph) -> None:
    """Eliminate common subexpressions of a graph without writes. Random draws, uninitialised
    memory and what the graph returns keep calls of their own."""
    results = {base_of(result) for result in graph.output_node().all_input_nodes}

    def repeats(node: fx.Node) -> bool:
        own = node.op != "call_function" or draws_random(node) or base_of(node) in results
        return not own and getattr(node.target, "overloadpacket", None) is not aten.empty

    _share(graph, repeats)


def _share(graph: fx.Graph, shared: Callable[[fx.Node], bool]) -> None:
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if shared(node):
            key = node.target, _spelled(node.args), _spelled(node.kwargs)
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _spelled(value: Any) -> Any:
    """A key that equal arguments share; 1, 1.0 and True are three, and 0.0 and -0.0 two."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_spelled, value))
    if isinstance(value, Mapping):
        return tuple((name, _spelled(one)) for name, one in value.items())
    if isinstance(value, slice):
        return slice, _spelled((value.start, value.stop, value.step))
    return value if isinstance(value, (fx.Node, str)) else (type(value), repr(value))


def base_of(node: fx.Node, looks: Looks = is_view) -> fx.Node:
    """The value whose memory ``node`` looks at; itself where it has its own."""
    while looks(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def op_name(node: fx.Node) -> str:
    """The name of what a node calls, for messages."""
    target = node.target
    is_op = isinstance(target, OpOverload)
    return str(target) if is_op else str(getattr(target, "__name__", target))


@functools.cache
def _parameters(target: Any) -> dict[str, Any]:
    """An ATen overload's argument names and their defaults; None where there is none."""
    arguments = target._schema.arguments
    return {a.name: a.default_value if a.has_default_value() else None for a in arguments}


def bound(call: Any) -> dict[str, Any]:
    """Arguments of an ATen call by their names in the schema, defaults included. A call is a node,
    or anything with ``target``, ``args`` and ``kwargs``."""
    names: dict[str, Any] = _parameters(call.target)
    return names | dict(zip(names, call.args, strict=False)) | dict(call.kwargs)


def with_arguments(call: Any, /, **changed: Any) -> tuple[list[Any], dict[str, Any]]:
    """``args`` and ``kwargs`` of an ATen call in which some arguments, by name, are others."""
    names = list(_parameters(call.target))
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in changed.items():
        if (at := names.index(name)) < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return args, kwargs


def example_of(node: fx.Node) -> Any:
    """The value that Dynamo or lowering noted for a node: a fake tensor, a SymInt, a number, a
    tuple of these; None if unknown."""
    return node.meta.get("example_value", node.meta.get("val"))


def held(node: fx.Node) -> Any:
    """The constant or body that a ``get_attr`` reads of its graph's module; None for nothing."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def fake_mode_of(graph: fx.Graph) -> Any:
    """The mode of a graph's fake tensors; None if it has none."""
    vals = map(example_of, graph.nodes)
    return next((val.fake_mode for val in vals if hasattr(val, "fake_mode")), None)


def tensor_val(node: object) -> torch.Tensor | None:
    """The node's (fake) tensor value, or None when it has none."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def val_of(node: object) -> torch.Tensor:
    """The (fake) tensor of a node that is known to hold one."""
    val = tensor_val(node)
    assert val is not None, f"%{node} holds no tensor"
    return val


def as_node(arg: Any) -> fx.Node:
    """An argument that is known to be a value of the graph."""
    assert isinstance(arg, fx.Node)
    return arg


def wrapper_of(value: object) -> str:
    """The name of a tensor subclass that wraps other tensors, such as torchao's quantised weights;
    empty for any other value."""
    return type(value).__name__ if hasattr(value, "__tensor_flatten__") else ""


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` is a graph value holding one tensor."""
    return tensor_val(node) is not None


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The node's shape; sizes may be symbolic."""
    return tuple(val_of(node).shape)


def hint(size: Size) -> int:
    """A size as a number: itself, or what the tracing run saw for a symbol.

    An unbacked symbol (a data-dependent count such as the rows of ``nonzero``) has no hint;
    it counts as 1, so byte estimates stay lower bounds.
    """
    if isinstance(size, int):
        return size
    return int(size.node.hint) if has_hint(size) else 1


def has_hint(*sizes: Size) -> bool:
    """Whether all sizes have hints; data-dependent ones, such as a count of rows, have none."""
    return all(isinstance(size, int) or size.node.has_hint() for size in sizes)


def fixed_size(size: Size) -> int | None:
    """A size as a number where guards have settled it, as in a capture at ``b // 2 == 1``; None
    where it varies. A symbol never stands for a number: PyTorch writes the number."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if expr.is_number:
        return int(expr)
    settled = not expr.is_Symbol and size.node.has_hint()
    return hint(size) if settled and statically_known_true(size == hint(size)) else None


def is_equal(left: Size, right: Size) -> bool:
    """Whether two sizes are equal whatever their symbols are; asks no guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    one, other = (s if isinstance(s, int) else s.node.expr for s in (left, right))
    return one == other or bool(sympy.expand(one - other) == 0)


def equal_shapes(left: Iterable[Size], right: Iterable[Size]) -> bool:
    """Whether two lists of sizes are the same for all batches; asks no guard."""
    one, other = [*left], [*right]
    return len(one) == len(other) and all(map(is_equal, one, other))


def equal_sizes(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for all batches, or in this one, which adds a guard. Only while a
    graph is captured: guards that are added later are never checked."""
    known = has_hint(left, right)
    return is_equal(left, right) or (known and hint(left) == hint(right) and bool(left == right))


def is_same(one: Any, other: Any, *, guards: bool = False) -> bool:
    """Whether two arguments of calls have the same value: one node, equal constants or sizes, or
    the same views and copies of such. ``guards``: sizes may be compared by ``equal_sizes``."""

    def same(a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, torch.SymInt) and isinstance(b, (int, torch.SymInt)):
            return (equal_sizes if guards else is_equal)(a, b)
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return type(a) is type(b) and bool(a == b)
        if isinstance(a.meta.get("val"), torch.SymInt):
            return same(a.meta["val"], b.meta.get("val"))
        if a.target != b.target or a.kwargs != b.kwargs:
            return False
        if is_call(a, *RESHAPES):  # however their sizes are given
            return same((a.args[0], shape_of(a)), (b.args[0], shape_of(b)))
        return (is_view(a) or is_call(a, *COPIES)) and same(a.args, b.args)

    return same(one, other)


def relax_views(graph: fx.Graph) -> None:
    """Let views of a graph that runs op by op be reshapes.

    NOTE [Why not as they were traced]: a reshape is traced as the view that strides of fake values
    allow. Some kernels give others (that of a learned attention mask's gradient, which is chosen at
    run time; constant_pad_nd, of what looks like channels-last), and there a view fails. A reshape
    is the same view where that can be, else a copy.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default


def memory_like(like: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """An uninitialised tensor with another one's sizes, strides and dtype, by default on its
    device."""
    where = like.device if device is None else device
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=where)


def copy_like(value: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A copy in the same layout. ``copy_`` refuses expanded dims, whose entries share memory, so
    one entry of each is written."""
    copy, strides = memory_like(value, device), value.stride()
    sizes = [
        min(n, 1) if stride == 0 else n for n, stride in zip(value.shape, strides, strict=True)
    ]
    copy.as_strided(sizes, strides).copy_(value.as_strided(sizes, strides))
    return copy


def gpu_of(values: Iterable[Any]) -> torch.device | None:
    """The GPU that some of these are tensors on, if any is."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type == "cuda"), None)


def numel_hint(node: fx.Node) -> int:
    """Number of elements, at the sizes seen while tracing."""
    return math.prod(map(hint, shape_of(node)))


def nbytes(node: fx.Node) -> int:
    """Bytes of the node's tensor, at the sizes seen while tracing."""
    val = tensor_val(node)
    return 0 if val is None else numel_hint(node) * val.element_size()


def needs_grad(node: object) -> bool:
    """Whether gradients flow through this value (set once by the lowering)."""
    return isinstance(node, fx.Node) and bool(node.meta.get("requires_grad", False))


def propagate_requires_grad(graph: fx.Graph) -> None:
    """Set ``meta["requires_grad"]`` on every node from the placeholders' own marks.

    A value needs a gradient when it is floating point, a live-in needs one, the op is not a detach,
    and not all that reads it is one, as where code runs under ``no_grad``. That is what autograd
    would find, except for non-differentiable float ops, where the mark is an upper bound (the vjp
    trace then finds no path and the gradient is absent).
    """
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta.setdefault("requires_grad", False)
        else:
            node.meta["requires_grad"] = _is_differentiated(node)
    for node in reversed(graph.nodes):
        if node.op != "placeholder" and node.users and not any(map(_hands_back, node.users)):
            node.meta["requires_grad"] = False


def _hands_back(reader: fx.Node) -> bool:
    """Whether a gradient may come from what reads a value."""
    return reader.op == "output" or needs_grad(reader)


#: Ops that hand no gradient on: they copy a value, or make one of its sizes.
_CONSTANT = (
    aten.detach.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
)


def _is_differentiated(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in _CONSTANT:
        return False
    return any(map(needs_grad, node.all_input_nodes)) and _has_float(node.meta.get("val"))


def _has_float(val: object) -> bool:
    if isinstance(val, torch.Tensor):
        return val.is_floating_point() or val.is_complex()
    if isinstance(val, (tuple, list)):
        return any(_has_float(item) for item in val)
    return False


def ancestors(nodes: Iterable[fx.Node], among: Container[fx.Node] | None = None) -> set[fx.Node]:
    """All nodes that ``nodes`` depend on, themselves included; with ``among``, only dependences
    through these nodes."""

    def inputs(node: fx.Node) -> Iterable[fx.Node]:
        read = node.all_input_nodes
        return read if among is None else [arg for arg in read if arg in among]

    return set(reached(nodes, inputs))


def reached(
    nodes: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    """Breadth-first search: ``nodes`` and all that ``onward`` leads to from them, each once."""
    seen = dict.fromkeys(nodes)
    waiting = deque(seen)
    while waiting:
        node = waiting.popleft()
        yield node
        for other in onward(node):
            if other not in seen:
                seen[other] = None
                waiting.append(other)


def replace_by(node: fx.Node, value: fx.Node | int) -> None:
    """Replace all uses of a size by another value of the graph, or by a number."""
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda arg: value if arg is node else arg
        )


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of a graph, in order."""
    inputs: list[fx.Node] = graph.find_nodes(op="placeholder")
    return inputs


def last_input(graph: fx.Graph) -> fx.Node:
    """The last placeholder: new values may go right after it, for a sort to place them."""
    return inputs_of(graph)[-1]


def add_input(graph: fx.Graph, name: str, val: Any, *, requires_grad: bool = False) -> fx.Node:
    """One more input of a graph, behind those that there are."""
    with graph.inserting_after(last_input(graph)):
        node = graph.placeholder(name)
    node.target = node.name  # which is its own
    node.meta |= {"val": val, "requires_grad": requires_grad}
    return node


def writes(gm: fx.GraphModule) -> bool:
    """Whether a traced graph writes into a value (an autograd formula may)."""
    return any(
        node.op == "call_function"
        and node.target is not operator.getitem
        and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in gm.graph.nodes
    )


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase calls whose results nobody reads, and graphs that nobody calls.

    Writes into inputs, assertions, random draws and ops without results stay. Unlike
    ``fx.Graph.eliminate_dead_code`` it does not enter graphs that are called: bodies of
    higher-order ops hold in-place calls whose results nobody reads.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)
    if (owner := graph.owning_module) is None:
        return
    read = {str(node.target).partition(".")[0] for node in graph.find_nodes(op="get_attr")}
    for name, held in list(owner.named_children()):
        if isinstance(held, fx.GraphModule) and name not in read:
            delattr(owner, name)


def _has_effect(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if draws_random(node):  # later draws depend on it
        return True
    acts = schema is not None and (schema.is_mutable or not schema.returns)
    return acts or "assert" in str(node.target)


def topological_sort(graph: fx.Graph) -> None:
    """Reorder the graph so that producers come first, keeping the old order where it is legal.

    What draws random numbers keeps its order in any case, so that it draws the same.
    """
    nodes = list(graph.nodes)
    left = set(nodes)
    before = {b: a for a, b in itertools.pairwise(filter(draws_random, nodes))}
    rest = list(range(len(nodes)))  # a heap: of what waits for nothing, the first goes first
    waiting: dict[fx.Node, list[int]] = {}
    last: fx.Node | None = None
    while rest:
        node = nodes[index := heapq.heappop(rest)]
        needed = (*node.all_input_nodes, before.get(node))
        missing = next((one for one in needed if one in left), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(index)
            continue
        if last is not None and last.next is not node:
            last.append(node)
        last = node
        left.remove(node)
        for index in waiting.pop(node, ()):
            heapq.heappush(rest, index)
    assert not left, "the graph has a cycle"


def is_pointwise(node: fx.Node) -> bool:
    """Whether PyTorch itself says of an op that it is elementwise."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def draws_random(node: fx.Node) -> bool:
    """Whether a call draws from a random generator; attention does where it has dropout."""
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return True
    return bool(bound(node)["dropout_p"] != 0.0)
