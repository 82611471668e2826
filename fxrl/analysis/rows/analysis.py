"""From a graph to row programs: what of a loss can run row by row, and what cannot, and why.

``analyse`` seeds the loss heads, walks the graph once with the row rules, and collects per
cluster of heads (heads whose logits meet, such as policy and teacher) either the row programs
that replace them or the first reason against. It changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows import compute, gradients, joins, layout
from fxrl.analysis.rows.expr import PATCHED, RowExpr, RowValue, leaves, spelled, walk
from fxrl.analysis.rows.heads import (
    factors,
    find_heads,
    find_wide_products,
    heads_in_functions,
    narrow_heads,
)
from fxrl.analysis.rows.rules import LIBRARY_PRODUCT, RowRules, Rule
from fxrl.ir.bodies import WITH_GRADIENT
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    IS_PART,
    MATRIX_PRODUCTS,
    QUANTIZE_ROWS,
    QUANTIZED_PRODUCTS,
    RESHAPES,
    TRANSPOSES,
    ancestors,
    fixed_size,
    hint,
    is_call,
    is_library_op,
    is_quantized_product,
    shape_of,
    tensor_val,
    wrapper_of,
)
from fxrl.ir.graph_pass import Miss
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

# fmt: off
#: What each op does to rows. An op that is not listed is elementwise by PyTorch's own tag, or has
#: no rule and is refused.
_RULES: list[tuple[Rule, tuple[Any, ...]]] = [
    (compute.pointwise, (
        aten.masked_fill.Tensor, aten.fill.Tensor, aten.fill.Scalar, aten.rsub.Tensor,
        aten.floor_divide.default, aten.hardswish.default, aten._prelu_kernel.default)),
    (compute.elementwise_loss, (
        aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default)),
    (compute.log_sigmoid, (aten.log_sigmoid_forward.default,)),
    (compute.copy_of, COPIES),
    (compute.filled, (
        aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
        aten.empty_like.default)),
    (compute.reduction, (
        aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
        aten.logsumexp.default, aten.prod.dim_int, aten.any.dim, aten.any.dims, aten.all.dim,
        aten.all.dims, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
        aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default,
        aten.aminmax.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList,
        aten.var.correction, aten.std.correction,
        aten.var_mean.correction, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)),
    (compute.whole_row, (
        aten._softmax.default, aten._log_softmax.default, aten.cumsum.default,
        aten.cumprod.default, aten.logcumsumexp.default, aten.sort.default, aten.sort.stable,
        aten.argsort.default, aten.topk.default, aten.cummax.default, aten.cummin.default)),
    (compute.layer_norm, (aten.native_layer_norm.default,)),
    (compute.matrix_product, (*MATRIX_PRODUCTS, *QUANTIZED_PRODUCTS, LIBRARY_PRODUCT)),
    (compute.vector_product, (aten.mv.default,)),
    (compute.row_products, (aten.bmm.default,)),
    (compute.quantized_rows, (QUANTIZE_ROWS,)),
    (gradients.with_gradient, (WITH_GRADIENT,)),
    (layout.view, (*RESHAPES, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)),
    (layout.unsqueeze, (aten.unsqueeze.default,)),
    (layout.expand, (aten.expand.default,)),
    (layout.permute, TRANSPOSES),
    (layout.reorder, (aten.flip.default, aten.roll.default)),
    (layout.slice_, (aten.slice.Tensor,)),
    (layout.select, (aten.select.int,)),
    (layout.unbind, (aten.unbind.int,)),
    (layout.split, (aten.split.Tensor, aten.split_with_sizes.default)),
    (joins.join, (aten.cat.default, aten.stack.default)),
    (joins.pad, (aten.constant_pad_nd.default,)),
    (layout.gather, (aten.gather.default,)),
    (layout.scatter, (
        aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter.reduce,
        aten.scatter.value_reduce, aten.scatter_reduce.two)),
    (layout.index_select, (aten.index_select.default,)),
    (layout.index, (aten.index.Tensor,)),
    (layout.write_columns, (
        aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_add.default,
        aten.index_copy.default)),
    (layout.entry_by_entry, (aten.masked_select.default, aten.take.default)),
    (joins.index_put, (aten.index_put.default,)),
    (joins.write_part, (aten.slice_scatter.default, aten.select_scatter.default)),
]
# fmt: on
#: By op, or by the name of one that is defined above this.
RULES: dict[Any, Rule] = {target: rule for rule, targets in _RULES for target in targets}


@dataclass(frozen=True, slots=True)
class RowOutput:
    """A narrow value that the region hands out: the node it replaces and its rows."""

    node: fx.Node
    value: RowValue
    # Set where ``node`` reduces over the vocabulary *and* over tokens: the region reduces over the
    # vocabulary, and this is the reduction that is left.
    second: compute.SecondStep | None = None

    def replace(self, builder: Builder, value: fx.Node) -> None:
        if self.second is not None:
            value = self.second(builder, value)
        if value is not self.node:
            self.node.replace_all_uses_with(value)

    @property
    def attached(self) -> bool:
        """Whether a gradient may come back to it."""
        return compute.is_trained(self.node)


@dataclass(frozen=True, slots=True)
class RowProgram:
    """Outputs computed together over the same rows of the same heads."""

    outputs: tuple[RowOutput, ...]

    @property
    def roots(self) -> list[RowExpr]:
        return [output.value.expr for output in self.outputs]


@dataclass(frozen=True, slots=True)
class HeadSite:
    """One cluster of heads, the programs that replace it and the wide values that then vanish."""

    anchor: fx.Node
    programs: tuple[RowProgram, ...]
    wide: tuple[fx.Node, ...]
    rules: RowRules


def analyse(graph: fx.Graph) -> Iterator[HeadSite | Miss]:
    """Every loss head of the graph, as a site or as a miss."""
    heads = find_heads(graph)
    if not heads:
        for node in narrow_heads(graph):
            classes, features = shape_of(node)[-1], shape_of(factors(node)[0])[-1]
            empty = 0 in map(fixed_size, shape_of(node))
            few = "no tokens" if empty else f"{classes} classes of {features} features"
            yield Miss(node, Refusal(f"{few}: nothing to save"), loses=False)
        for node, logits in heads_in_functions(graph):
            kept = "returns logits" if logits else "says what is kept"
            reason = f"a function that stays one call multiplies by the head itself, and {kept}"
            yield Miss(node, Refusal(reason), loses=logits)
        return
    vocab = min(hint(shape_of(head)[-1]) for head in heads)
    yield from _judged(_Walk(graph, heads, (vocab + 1) // 2))  # logits may be split in two


def analyse_layer(graph: fx.Graph) -> Iterator[HeadSite | Miss]:
    """What of a layer is wider than what it returns, from the products that widen it, until it is
    narrow again and one value (an adapter's part is added), as sites or as misses.

    Sizes are equal here by their symbols alone: a layer is analysed again for each new plan, and
    the capture's guards are fixed by then.
    """
    shapes = [shape_of(node) for node in graph.output_node().all_input_nodes]
    width = max((hint(shape[-1]) for shape in shapes if shape), default=0)
    if products := find_wide_products(graph, width):
        yield from _judged(_Walk(graph, products, width + 1, joins=True, guards=False))


def _judged(walked: _Walk) -> Iterator[HeadSite | Miss]:
    for cluster in walked.clusters():
        try:
            yield walked.judge(cluster)
        except Refusal as refusal:
            yield Miss(cluster[0], refusal)


def _asserted_equal(graph: fx.Graph) -> set[frozenset[str]]:
    """Pairs of sizes that each run asserts to be equal: of two masks that select the same rows."""
    asserts = graph.find_nodes(op="call_function", target=aten._assert_scalar.default)
    tests = [node.args[0] for node in asserts]
    return {frozenset(map(spelled, test.args)) for test in tests if is_call(test, operator.eq)}


class _Walk:
    """One pass over the graph with the rules, and the questions asked of it afterwards. ``joins``:
    several narrow values that are only read as one value are followed up to that one. ``guards``:
    the capture may still add guards."""

    def __init__(
        self,
        graph: fx.Graph,
        heads: list[fx.Node],
        wide: int,
        *,
        joins: bool = False,
        guards: bool = True,
    ) -> None:
        self._joins = joins
        self.rules = RowRules(
            wide,
            RULES,
            compute.pointwise,
            narrow_products=joins,
            guards=guards,
            asserted=_asserted_equal(graph),
        )
        self.heads = heads
        self.refused: dict[fx.Node, Refusal] = {}
        self.first_steps: dict[fx.Node, tuple[RowValue, compute.SecondStep]] = {}
        self._heads_of: dict[int, frozenset[fx.Node]] = {}
        self._head_exprs: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in graph.nodes:
            self._visit(node)

    # -- the walk
    def _visit(self, node: fx.Node) -> None:
        if node in self.heads:
            self._seed(node)
            return
        reads = [arg for arg in node.all_input_nodes if arg in self.rules.values]
        if not reads or node.op != "call_function" or is_call(node, aten.sym_size.int):
            return
        try:
            self.rules.follow(node)
        except Refusal as refusal:
            if (steps := compute.in_two_steps(self.rules, node)) is None:
                self.refused[node] = refusal
            else:
                self.first_steps[node] = steps

    def _seed(self, head: fx.Node) -> None:
        try:
            value = compute.seed(self.rules, head)
        except Refusal as refusal:
            self.refused[head] = refusal
            return
        self.rules.values[head] = value
        for expr in walk([value.expr]):
            key = _head_key(expr)
            if key is not None:
                self._head_exprs[key] = head

    # -- questions
    def heads_of(self, expr: RowExpr) -> frozenset[fx.Node]:
        """The heads whose logits an expression reads."""
        for part in walk([expr]):
            if id(part) in self._heads_of:
                continue
            key = _head_key(part)
            found = {self._head_exprs[key]} if key in self._head_exprs else set()
            inner = [self._heads_of[id(operand)] for operand in part.operands()]
            self._heads_of[id(part)] = frozenset(found).union(*inner)
        return self._heads_of[id(expr)]

    def clusters(self) -> list[list[fx.Node]]:
        """Heads grouped by whose logits meet in one expression; refused heads stand alone."""
        parent = {head: head for head in self.heads}

        def root(head: fx.Node) -> fx.Node:
            while parent[head] is not head:
                head = parent[head]
            return head

        for node in self.rules.values:
            for value in self._row_values(node):
                first, *rest = [*self.heads_of(value.expr)] or [self.heads[0]]
                for other in rest:
                    parent[root(other)] = root(first)
        groups: dict[fx.Node, list[fx.Node]] = {}
        for head in self.heads:
            groups.setdefault(root(head), []).append(head)
        return list(groups.values())

    def _row_values(self, node: fx.Node) -> list[RowValue]:
        value = self.rules.values[node]
        return list(value) if isinstance(value, tuple) else [value]

    def judge(self, cluster: list[fx.Node]) -> HeadSite:
        for head in cluster:
            if head in self.refused:
                raise _at(self.refused[head], head)
            if kind := wrapper_of(tensor_val(factors(head)[1])):
                reason = f"the head's weight is of class {kind}, which only its own ops can read"
                raise Refusal(reason, "leave the loss head out of what you quantise", head)
        mine = set(cluster)
        wide = [
            node
            for node in self.rules.values
            if any(v.wide and self.heads_of(v.expr) & mine for v in self._row_values(node))
        ]
        for node in wide:
            self._check_readers(node)
        outputs = self._outputs(wide)
        for output in outputs:
            self._check_rows(output)
        if not outputs:
            raise Refusal("nothing reads the logits", at=cluster[0])
        for head in self.heads:
            if ancestors([factors(head)[0]]) & {output.node for output in outputs}:
                raise Refusal(
                    "the logits re-enter a layer that leads back to a vocabulary dim", at=head
                )
        return HeadSite(cluster[0], tuple(programs(outputs)), tuple(wide), self.rules)

    def _check_readers(self, node: fx.Node) -> None:
        for user in node.users:
            if user in self.rules.values or user in self.first_steps or not _is_read(user):
                continue
            if user.op == "output":
                raise Refusal(*_why_they_leave(user.graph), node)
            unseen = Refusal(f"the logits enter %{user}, opaque to fxrl")
            raise _at(self.refused.get(user, unseen), user)

    def _check_rows(self, output: RowOutput) -> None:
        """Refuse an expression that reads the same hidden states under two row selections."""
        chains: dict[fx.Node, set[str]] = {}
        hidden = {node for node, _ in self._head_exprs}
        for expr in walk([output.value.expr]):
            if expr.target == PATCHED:
                cure = "read the part that was written, or write with torch.where"
                raise Refusal("a write into a slice runs over tokens", cure, output.node)
            if expr.leaf is not None and expr.leaf.takes("expand"):
                raise Refusal(layout.EXPANDED, at=output.node)
            if expr.leaf is not None and expr.leaf.tiled and expr.leaf.node in hidden:
                chains.setdefault(expr.leaf.node, set()).add(str(expr.leaf.steps))
        if any(len(found) > 1 for found in chains.values()):
            reason = "the logits of different tokens are combined"
            cure = "reduce over the vocabulary first, or multiply each part's rows by the head"
            raise Refusal(reason, cure, output.node)

    def _outputs(self, wide: list[fx.Node]) -> list[RowOutput]:
        """Narrow values that read a wide one and are themselves read."""
        found: dict[fx.Node, RowOutput] = {}
        for node in wide:
            for user in node.users:
                self._collect(user, found)
        outputs = list(found.values())
        return self._joined(outputs) if self._joins else outputs

    def _joined(self, outputs: list[RowOutput]) -> list[RowOutput]:
        """The first value through which all of these are read; themselves where there is none."""
        ahead = {output.node for output in outputs if output.second is None}
        while len(ahead) > 1:
            node = min(ahead)
            readers = set(filter(_is_read, node.users))
            values = [self.rules.values.get(reader) for reader in readers]
            if not values or not all(isinstance(v, RowValue) and not v.wide for v in values):
                return outputs
            ahead = ahead - {node} | readers
        return [RowOutput(node, self._row_values(node)[0]) for node in ahead] or outputs

    def _collect(self, user: fx.Node, found: dict[fx.Node, RowOutput]) -> None:
        if user in self.first_steps:
            found[user] = RowOutput(user, *self.first_steps[user])
            return
        value = self.rules.values.get(user)
        if isinstance(value, tuple):
            for item in user.users:
                if not self._row_values(item)[0].wide:
                    self._collect(item, found)
        elif value is not None and not value.wide and any(map(_is_read, user.users)):
            if is_call(user, aten.argmax.default) and all(
                is_call(reader, aten.eq.Tensor) and reader in self.rules.values
                for reader in user.users
            ):  # only the comparison with the target is read: a hit is all that is needed
                for reader in user.users:
                    self._collect(reader, found)
                return
            found[user] = RowOutput(user, value)


def _at(refusal: Refusal, node: fx.Node) -> Refusal:
    return Refusal(refusal.reason, refusal.cure, refusal.at or node)


def _is_read(user: fx.Node) -> bool:
    return not is_call(user, aten.sym_size.int)


def _head_key(expr: RowExpr) -> tuple[fx.Node, int] | None:
    """What a head's product is known by, under any row selection: hidden node and weight."""
    if not _is_product(expr):
        return None
    rows, matrix, _ = factors(expr)
    return (rows.leaf.node, id(matrix)) if rows.leaf is not None else None


def _is_product(expr: RowExpr) -> bool:
    of_library = is_library_op(expr.target) and len(expr.args) > 1
    return expr.target in MATRIX_PRODUCTS or is_quantized_product(expr) or of_library


def programs(outputs: list[RowOutput]) -> list[RowProgram]:
    """Group outputs that share a head's rows; split where one feeds an input of another.

    NOTE [Why stages]: an output may come back through token-mixing code, such as a weight from
    the batch's mean entropy. One region cannot hold both ends of that cycle, so the later
    outputs form a second region that recomputes the logits.
    """
    nodes = {output.node for output in outputs}
    stage: dict[fx.Node, int] = {}
    groups: list[tuple[set[tuple[int, int]], list[RowOutput]]] = []  # rows, and who reads them
    for output in sorted(outputs, key=lambda output: output.node):
        root = output.value.expr
        inputs = [leaf.leaf.node for leaf in leaves([root]) if leaf.leaf is not None]
        before = [stage[node] for node in ancestors(inputs) if node in nodes]
        stage[output.node] = here = 1 + max(before, default=-1)
        keys = {(rows, here) for rows in _product_rows([root])}
        met = [group for group in groups if not keys.isdisjoint(group[0])]
        if not met:
            groups.append((set(), []))
        (known, found), *others = met or groups[-1:]
        for other in others:  # two heads with an output each, and this one of both
            known |= other[0]
            found += other[1]
            groups.remove(other)
        known |= keys
        found.append(output)
    return [RowProgram(tuple(found)) for _, found in groups]


def _product_rows(roots: list[RowExpr]) -> set[int]:
    """Identities of the leaves that a product reads as rows."""
    found = set()
    for expr in filter(_is_product, walk(roots)):
        rows, _, _ = factors(expr)
        if rows.leaf is not None:
            found.add(id(rows))
    return found


def _why_they_leave(graph: fx.Graph) -> tuple[str, str]:
    """Reason and cure of logits that a graph gives back."""
    owner = graph.owning_module
    if owner is not None and IS_PART in owner.meta:
        return "the logits leave the graph, which holds only a part of the loss", ""
    return (
        "the logits leave the traced code: returned, stored or handed to a hook",
        "return what is computed from them, per token",
    )
