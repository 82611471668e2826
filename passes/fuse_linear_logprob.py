"""Fuse the LM head with token log-probabilities and similar statistics: logits never exist.

    %logits = mm(%hidden, t(%weight))                    [N, V]  the peak of an RL step
    %logps  = _log_softmax(%logits / T)                  [N, V]  and its twin
    %logp   = gather(%logps, %target)                    [N]
becomes
    %logp   = fxrl.linear_logprob(%hidden, %weight, %target, ...)[0]

Also log-sum-exp, entropy, mean logit, sum p^2 and top-1 hits of the same logits, however the loss
spells them; bias, scale, softcap and temperature are read from the graph.

NOTE [Why fp32 inside]: the op accumulates and reduces the logits in fp32 (float64 for float64
inputs) and casts the result, even where the loss computes in bf16. That is at least as accurate,
and the first step's ratio is exactly 1, since scoring and training run the same op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.logprob.algebra import HIT, LogprobAlgebra
from fxrl.analysis.logprob.forms import Transform
from fxrl.analysis.logprob.targets import equal
from fxrl.analysis.rows.analysis import HeadSite, RowProgram
from fxrl.analysis.rows.cost import eager_bytes
from fxrl.analysis.rows.emit import RowEmitter, as_argument
from fxrl.analysis.rows.expr import RowExpr, walk
from fxrl.dtypes import wide_dtype
from fxrl.ir.graph import (
    MATRIX_PRODUCTS,
    SHARDED_MM,
    bound,
    hint,
    is_piecewise_product,
    last_input,
    nbytes,
    needs_grad,
    shape_of,
    val_of,
)
from fxrl.ir.graph_pass import PassDoc
from fxrl.ir.remark import Refusal
from fxrl.ops.linear_logprob import OUTPUTS, LossHead
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    joined_outputs,
    made_in_forward,
    parse_outputs,
)
from fxrl.ops.piecewise_head import PART, Held
from fxrl.passes.chunk_vocab_region import HeadCluster, HeadPass

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class FusedProgram:
    """One row program in terms of the op: what was recognised, and the outputs computed from it."""

    program: RowProgram
    algebra: LogprobAlgebra
    roots: tuple[RowExpr, ...]


@dataclass(frozen=True, slots=True)
class LogprobSite(HeadCluster):
    """Heads of one cluster, every program of which the op can serve."""

    fused: tuple[FusedProgram, ...]


@dataclass(frozen=True)
class FuseLinearLogprob(HeadPass[LogprobSite]):
    """The fast path of the loss head."""

    name = "fuse-linear-logprob"
    doc = PassDoc(
        "`lm_head`, then bias, scale, softcap, temperature as the graph has them, then log-probs "
        "of given tokens, log-sum-exp, entropy, mean logit, sum of p², top-1 hits",
        "the logits and every copy of them; with a frozen head also the backward's matmul over the "
        "vocabulary. bf16 on Hopper (sm_90): a CUDA GEMM with the statistics in its epilogue; "
        "other GPUs and dtypes: cuBLAS and Triton",
        "frozen head: one `[N, H]` vector each for log-prob and log-sum-exp; where another output "
        "is differentiated, or the head is trained, the tile's matmul once more in backward",
        "the loss wants another statistic of the logits: `chunk-vocab-region` takes it; or for "
        "that pass's reasons",
    )

    def site(self, head: HeadSite) -> LogprobSite:
        fused = tuple(recognise(head, program) for program in head.programs)
        return LogprobSite(head.anchor, eager_bytes(head), head, fused)

    def replace(
        self, gm: fx.GraphModule, site: LogprobSite, tile_tokens: int, tile: int
    ) -> tuple[str, int]:
        with gm.graph.inserting_after(last_input(gm.graph)):
            emitter = RowEmitter(gm.graph)
            for fused in site.fused:
                emitter.check_restorable(output.value for output in fused.program.outputs)
            name = f"{site.name}.linear_logprob"
            vectors = [_Emission(emitter, fused, tile_tokens, name).run() for fused in site.fused]
            emitter.count_rows(site.head.wide)
        stats = sorted({name for fused in site.fused for name in fused.algebra.stats})
        return f"never exist; computes {', '.join(stats)}", sum(vectors)


def recognise(site: HeadSite, program: RowProgram) -> FusedProgram:
    """A row program as statistics of one head. Raises ``Refusal`` if it has several heads, or needs
    a statistic that the op does not return."""
    exprs = walk(program.roots)
    products = [e for e in exprs if e.target in MATRIX_PRODUCTS or is_piecewise_product(e)]
    if len(products) != 1:
        raise Refusal("the logits of several heads are used together")
    (head,) = products
    rows = head.args[head.target is aten.addmm.default]
    if rows.leaf is None:
        raise Refusal("the head reads computed rows")
    algebra = LogprobAlgebra(site.rules.pool, head, hint(shape_of(site.anchor)[-1]))
    roots = tuple(algebra.narrow(out.value.expr, out.attached) for out in program.outputs)
    if not algebra.stats:
        raise Refusal("nothing of the vocabulary is reduced")
    biased = algebra.transform is not None and algebra.transform.bias is not None
    if is_piecewise_product(head) and (biased or head.args[-1]):
        why = "its logits have a bias" if biased else "is multiplied by the other way round"
        raise Refusal(f"the head is read in pieces of its vocabulary, and {why}")
    return FusedProgram(program, algebra, roots)


def differentiated_outputs(head: fx.Node) -> set[str]:
    """The outputs of a fused head whose gradients are taken."""
    given = bound(head)
    if not any(map(needs_grad, head.all_input_nodes)):
        return set()
    names = given["outputs"] if given["grad_outputs"] is None else given["grad_outputs"]
    return {*parse_outputs(names)} & {*DIFFERENTIABLE}


class _Emission:
    """Writes one fused program into the graph."""

    def __init__(
        self, emitter: RowEmitter, fused: FusedProgram, tile_tokens: int, site: str
    ) -> None:
        self.emitter, self.site = emitter, site
        self.call = emitter.builder.call
        self.fused = fused
        self.algebra = fused.algebra
        self.tile_tokens = tile_tokens
        self.env: dict[int, fx.Node] = {}
        self.stats: dict[str, fx.Node] = {}

    def run(self) -> int:
        """Returns the bytes of the gradients that the op's forward makes."""
        vectors = self._op()
        for output, root in zip(self.fused.program.outputs, self.fused.roots, strict=True):
            rows, dtype = self.emit(root), val_of(output.node).dtype
            if val_of(rows).dtype != dtype:
                rows = self.call(aten._to_copy.default, rows, dtype=dtype)
            output.replace(self.emitter.builder, self.emitter.restore(rows, output.value))
        return vectors

    # -- the op itself
    def _op(self) -> int:
        head, transform = self.algebra.head, self.algebra.transform
        assert transform is not None
        hidden = self.emit(head.args[head.target is aten.addmm.default])
        stats = self.algebra.stats
        differentiated = [name for name in OUTPUTS if stats.get(name)]
        options: dict[str, Any] = {
            "bias": None if transform.bias is None else self.emit(transform.bias),
            "temperature": self._temperature(hidden, transform),
            "scale": transform.scale,
            "softcap": transform.softcap,
            "outputs": joined_outputs(stats),
            "grad_outputs": joined_outputs(differentiated),
            "chunk_tokens": self.tile_tokens,
        }
        options = {k: v for k, v in options.items() if v != LossHead._field_defaults.get(k)}
        if is_piecewise_product(head):
            op, weight = torch.ops.fxrl.piecewise_logprob.default, self.emit(head.args[1][0])
            options |= self._held(head, hidden)
        else:
            op, weight = torch.ops.fxrl.linear_logprob.default, self._weight(head.args[-1])
        target = self._target(hidden)
        call = self.call(op, hidden, weight, target, **options)
        call.meta["site"] = self.site
        for index, name in enumerate(OUTPUTS):
            if name in stats:
                self.stats[name] = self.call(operator.getitem, call, index)
        self.target = target
        trained = needs_grad(weight) or needs_grad(options.get("bias"))
        made = needs_grad(hidden) and made_in_forward(trained, differentiated)
        return made * len(differentiated) * nbytes(hidden)

    def _held(self, head: RowExpr, hidden: fx.Node) -> dict[str, Any]:
        """How the weight of a head that is read in pieces is stored."""
        weight, *layout = head.args[1:]
        _, *scales = map(self.emit, weight)
        scale: Any = scales[0] if scales else None
        dtype = val_of(hidden).dtype
        if str(head.target) == SHARDED_MM:
            vocab, stored, format, _ = layout
            if format:
                return Held(scale, f"{PART}:{format}", vocab, dtype)._asdict()
            return Held(None, PART, vocab, stored)._asdict()
        vocab = shape_of(self.emit(weight[0]))[0]
        return Held(scale, layout[0], vocab, dtype)._asdict()  # type: ignore[arg-type]

    def _weight(self, matrix: RowExpr) -> fx.Node:
        """The weight as ``[V, H]``: the right operand transposed, or before its transpose."""
        if matrix.target is aten.t.default:
            return self.emit(matrix.args[0])
        return self.emitter.call(aten.t.default, self.emit(matrix))

    def _target(self, hidden: fx.Node) -> fx.Node:
        if self.algebra.target is None:  # any id will do
            first = self.emitter.call(aten.select.int, hidden, 1, 0)
            return self.call(aten.zeros_like.default, first, dtype=torch.int64)
        target = self._flat(self.emit(self.algebra.target))
        if val_of(target).dtype != torch.int64:  # ids of whatever width pick the same token
            target = self.call(aten._to_copy.default, target, dtype=torch.int64)
        if self.algebra.picked:
            return target
        return self.call(aten.clamp.default, target, 0, self.algebra.vocab - 1)

    def _flat(self, rows: fx.Node) -> fx.Node:
        """``[n]`` of one entry per row."""
        if len(shape_of(rows)) <= 1:
            return rows
        return self.emitter.call(aten.reshape.default, rows, [-1])

    def _hit(self, ids: RowExpr) -> fx.Node:
        """Whether the best token is that of ``ids``; none is where they were moved inside."""
        hit, target = self.stats["argmax_hit"], self.algebra.target
        assert target is not None
        if self.algebra.picked and equal(target, ids, self.algebra.vocab):
            return hit
        inside = self.call(aten.eq.Tensor, self._flat(self.env[id(ids)]), self.target)
        return self.call(aten.logical_and.default, hit, inside)

    def _temperature(self, hidden: fx.Node, transform: Transform) -> fx.Node | None:
        if transform.temperature is not None:
            given = self._flat(self.emit(transform.temperature))
            if transform.divisor == 1:
                return given
            return self.emitter.call(aten.mul.Tensor, given, transform.divisor)
        if transform.divisor == 1:
            return None
        val = val_of(hidden)
        wide = wide_dtype(val.dtype)
        return self.call(aten.full.default, [], transform.divisor, dtype=wide, device=val.device)

    # -- narrow expressions over its results
    def emit(self, root: RowExpr) -> fx.Node:
        """The graph value of a narrow expression, on all rows."""
        for expr in walk([root]):
            if id(expr) not in self.env:
                self.env[id(expr)] = self._emit_one(expr)
        return self.env[id(root)]

    def _emit_one(self, expr: RowExpr) -> fx.Node:
        if expr.leaf is not None:
            return self.emitter.feed(expr.leaf)
        if expr.target == "stat":
            return self.stats[expr.args[0]]
        if expr.target == HIT:
            return self._hit(expr.args[0])
        args = [as_argument(arg, self.env) for arg in expr.args]
        kwargs = {name: as_argument(value, self.env) for name, value in expr.kwargs}
        return self.call(expr.target, *args, **kwargs)
