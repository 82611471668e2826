"""Fuse the LM head into the token log-probability and its kin, so the logits never exist.

    %logits = mm(%hidden, t(%weight))                    [N, V]  the peak of an RL step
    %logps  = _log_softmax(%logits / T)                  [N, V]  and its twin
    %logp   = gather(%logps, %target)                    [N]
becomes
    %logp   = fxrl.linear_logprob(%hidden, %weight, %target, ...)[0]

Also log-sum-exp, entropy, mean logit, sum p^2 and top-1 hits of the same logits, in whatever
algebra the loss writes them, with bias, scale, softcap and temperature read from the graph.

NOTE [Why fp32 inside]: the op accumulates the logits and reduces them in fp32 (float64 for float64
inputs) and casts the result, also where the loss computes in bf16: no further from the truth, and
the first step's ratio is exactly 1, since scoring and training take the same route.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import fx

import fxrl.analysis.logprob.reductions
import fxrl.analysis.logprob.rules  # noqa: F401  (both register their rules)
from fxrl.analysis.logprob.algebra import LogprobAlgebra
from fxrl.analysis.logprob.forms import NotRecognised
from fxrl.analysis.rows.analysis import HeadMiss, HeadSite, RowProgram, analyse
from fxrl.analysis.rows.cost import eager_bytes, row_bytes, tile_rows
from fxrl.analysis.rows.emit import RowEmitter
from fxrl.analysis.rows.expr import RowExpr, walk
from fxrl.config import Config, parse_bytes
from fxrl.ir.graph import last_input, shape_of, tensor_val
from fxrl.ir.graph_pass import Applied, Miss, Pass, PassDoc, Site
from fxrl.ir.plan import Choice, choose_head, tokens_per_tile
from fxrl.ir.remark import Refusal
from fxrl.ops.linear_logprob import OUTPUTS, LossHead

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class FusedProgram:
    """One row program in terms of the op: the recogniser's findings and the outputs over them."""

    program: RowProgram
    algebra: LogprobAlgebra
    roots: tuple[RowExpr, ...]


@dataclass(frozen=True, slots=True)
class LogprobSite(Site):
    """Heads of one cluster, every program of which the op can serve."""

    head: HeadSite
    fused: tuple[FusedProgram, ...]


@dataclass(frozen=True)
class FuseLinearLogprob(Pass[LogprobSite]):
    """The fast path of the loss head.

    Attributes:
        tile_tokens: rows per tile; 0 lets the op decide.
        min_saved_bytes: a head predicted to save less stays.
    """

    tile_tokens: int = 0
    min_saved_bytes: int = 0

    name: ClassVar[str] = "fuse-linear-logprob"
    doc: ClassVar[PassDoc] = PassDoc(
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

    @classmethod
    def of(cls, config: Config) -> Self:
        """Tiles and threshold as configured."""
        return cls(config.chunk_tokens or 0, parse_bytes(config.min_saved_bytes))

    def match(self, gm: fx.GraphModule) -> Iterator[LogprobSite | Miss]:
        for found in analyse(gm.graph):
            if isinstance(found, HeadMiss):
                yield Miss(found.anchor, Refusal(found.reason, found.cure, found.at))
                continue
            try:
                fused = tuple(recognise(found, program) for program in found.programs)
            except NotRecognised as why:
                yield Miss(found.anchor, Refusal(str(why)))
            else:
                yield LogprobSite(found.anchor, eager_bytes(found), found, fused)

    def decide(self, site: LogprobSite) -> Choice:
        """Worth it by the bytes it saves."""
        return choose_head(self.name, site.saved_bytes, self.tile_tokens, self.min_saved_bytes)

    def rewrite(self, gm: fx.GraphModule, site: LogprobSite, choice: Choice) -> Applied:
        tile_tokens = tokens_per_tile(choice)
        per_row = row_bytes(site.head)
        head = tensor_val(site.anchor)
        assert head is not None
        with gm.graph.inserting_after(last_input(gm.graph)):
            emitter = RowEmitter(gm.graph)
            for fused in site.fused:
                emitter.check_restorable(output.value for output in fused.program.outputs)
            for fused in site.fused:
                _Emission(emitter, fused, tile_tokens).run()
        tile = tile_rows(per_row, head.device, tile_tokens)
        stats = sorted({name for fused in site.fused for name in fused.algebra.stats})
        shape = " x ".join(str(size) for size in shape_of(site.anchor))
        what = f"logits [{shape}] never exist; computes {', '.join(stats)}"
        return Applied(
            what,
            max(0, site.saved_bytes - 3 * tile * per_row),
        )


def recognise(site: HeadSite, program: RowProgram) -> FusedProgram:
    """A row program as statistics of one head.

    Raises:
        NotRecognised: it has several heads, or needs a statistic that the op does not return.
    """
    products = [e for e in walk(program.roots) if e.target in (aten.mm.default, aten.addmm.default)]
    if len(products) != 1:
        raise NotRecognised("the logits of several heads are used together")
    if any(output.post for output in program.outputs):
        raise NotRecognised(
            "a vocabulary-sized value is reduced over tokens and vocabulary at once"
        )
    (head,) = products
    rows = head.args[0] if head.target is aten.mm.default else head.args[1]
    if rows.leaf is None:
        raise NotRecognised("the head reads computed rows")
    algebra = LogprobAlgebra(site.rules.pool, head, site.rules.vocab)
    roots = tuple(algebra.narrow(root) for root in program.roots)
    if not algebra.stats:
        raise NotRecognised("nothing of the vocabulary is reduced")
    return FusedProgram(program, algebra, roots)


class _Emission:
    """Writes one fused program into the graph."""

    def __init__(self, emitter: RowEmitter, fused: FusedProgram, tile_tokens: int) -> None:
        self.emitter = emitter
        self.graph = emitter.graph
        self.fused = fused
        self.algebra = fused.algebra
        self.tile_tokens = tile_tokens
        self.env: dict[int, fx.Node] = {}
        self.stats: dict[str, fx.Node] = {}

    def run(self) -> None:
        self._op()
        for output, root in zip(self.fused.program.outputs, self.fused.roots, strict=True):
            rows = self._cast(self.emit(root), output.node)
            output.node.replace_all_uses_with(self.emitter.restore(rows, output.value))

    def _cast(self, rows: fx.Node, like: fx.Node) -> fx.Node:
        wanted, have = tensor_val(like), tensor_val(rows)
        assert wanted is not None
        assert have is not None
        if wanted.dtype == have.dtype:
            return rows
        cast = self.graph.call_function(aten._to_copy.default, (rows,), {"dtype": wanted.dtype})
        cast.meta["val"] = have.to(wanted.dtype)
        return cast

    # -- the op itself
    def _op(self) -> None:
        head, transform = self.algebra.head, self.algebra.transform
        assert transform is not None
        rows, matrix = head.args[-2:]
        hidden = self.emit(rows)
        weight = self._weight(matrix)
        bias = None if transform.bias is None else self.emit(transform.bias)
        options = {
            "bias": bias,
            "temperature": self._temperature(hidden),
            "scale": transform.scale,
            "softcap": transform.softcap,
            "outputs": ",".join(name for name in OUTPUTS if name in self.algebra.stats),
            "grad_outputs": ",".join(name for name in OUTPUTS if self.algebra.stats.get(name)),
            "chunk_tokens": self.tile_tokens,
        }
        call = self.graph.call_function(
            torch.ops.fxrl.linear_logprob.default,
            (hidden, weight, self._target(hidden)),
            {k: v for k, v in options.items() if v != LossHead._field_defaults.get(k)},
        )
        example = tensor_val(hidden)
        assert example is not None
        count = example.shape[0]
        wide = torch.float64 if example.dtype == torch.float64 else torch.float32
        vals = []
        for name in OUTPUTS:
            dtype = torch.bool if name == "argmax_hit" else wide
            size = count if name in self.algebra.stats else 0
            vals.append(example.new_empty((size,), dtype=dtype))
        call.meta["val"] = tuple(vals)
        for index, name in enumerate(OUTPUTS):
            if name in self.algebra.stats:
                item = self.graph.call_function(operator.getitem, (call, index))
                item.meta["val"] = vals[index]
                self.stats[name] = item

    def _weight(self, matrix: RowExpr) -> fx.Node:
        """``[V, H]``: the transposed operand without its transpose, or with one more."""
        if matrix.target is aten.t.default:
            return self.emit(matrix.args[0])
        return self.emitter.call(aten.t.default, self.emit(matrix))

    def _target(self, hidden: fx.Node) -> fx.Node:
        if self.algebra.target is not None:
            target = self.emit(self.algebra.target)
            val = tensor_val(target)
            assert val is not None
            if val.dim() != 1:
                target = self.emitter.call(
                    aten.reshape.default, target, [-1], val=val.new_empty((val.shape[0],))
                )
            return target
        first = self.emitter.call(aten.select.int, hidden, 1, 0)  # no target: any id will do
        val = tensor_val(first)
        assert val is not None
        zeros = self.graph.call_function(aten.zeros_like.default, (first,), {"dtype": torch.int64})
        zeros.meta["val"] = val.new_empty(val.shape, dtype=torch.int64)
        return zeros

    def _temperature(self, hidden: fx.Node) -> fx.Node | None:
        transform = self.algebra.transform
        assert transform is not None
        example = tensor_val(hidden)
        assert example is not None
        if transform.temperature is None and transform.divisor == 1:
            return None
        if transform.temperature is None:
            wide = torch.float64 if example.dtype == torch.float64 else torch.float32
            number = self.graph.call_function(
                aten.full.default,
                ([], transform.divisor),
                {"dtype": wide, "device": example.device},
            )
            number.meta["val"] = example.new_empty((), dtype=wide)
            return number
        given = self.emit(transform.temperature)
        val = tensor_val(given)
        assert val is not None
        if val.dim() > 1:
            given = self.emitter.call(
                aten.reshape.default, given, [-1], val=val.new_empty((val.shape[0],))
            )
        return (
            given
            if transform.divisor == 1
            else self.emitter.call(aten.mul.Tensor, given, transform.divisor)
        )

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
        args = tuple(self._arg(arg) for arg in expr.args)
        kwargs = {name: self._arg(value) for name, value in expr.kwargs}
        node = self.graph.call_function(expr.target, args, kwargs)
        real = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = expr.target(*real[0], **real[1])
        return node

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, RowExpr):
            return self.env[id(arg)]
        return [self._arg(item) for item in arg] if isinstance(arg, tuple) else arg
