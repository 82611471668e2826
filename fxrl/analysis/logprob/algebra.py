"""Recognise log-probabilities, entropies and their kin, however they are written.

``LogprobAlgebra.narrow`` rewrites a narrow row expression (one number per token) over the
vocabulary into one over the statistics of ``fxrl::linear_logprob``. It knows algebra, not idioms:
a softmax that is gathered and then logged, a hand-written stable log-sum-exp and a
``Categorical`` all reduce to the same three forms (``logprob_forms``). What needs another
statistic is not recognised, with the reason; then the general region takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fxrl.analysis.logprob.forms import Affine, Exp, Form, NotRecognised, Transform
from fxrl.analysis.rows.expr import ExprPool, RowExpr
from fxrl.ir.graph import hint, is_call, shape_of

aten = torch.ops.aten


class LogprobAlgebra:
    """The recogniser for one head.

    Attributes:
        vocab: size of the vocabulary.
        target: the ids whose log-prob is taken, ``[n]`` or ``[n, 1]``, once seen.
        transform: the logits that all statistics are of, once seen.
        stats: name of each statistic used -> whether it is differentiated.
    """

    def __init__(self, pool: ExprPool, head: RowExpr, vocab: int) -> None:
        self.pool = pool
        self.head = head
        self.vocab = vocab
        self.target: RowExpr | None = None
        self.transform: Transform | None = None
        self.stats: dict[str, bool] = {}
        self._forms: dict[tuple[int, bool], Form | None] = {}
        self._narrow: dict[tuple[int, bool], RowExpr] = {}

    # ------------------------------------------------------------------ statistics
    def stat(self, name: str, transform: Transform, attached: bool) -> RowExpr:
        """The ``[n]`` expression of a statistic of the op."""
        if self.transform is None:
            self.transform = transform
        if self.transform.key() != transform.key():
            raise NotRecognised("two different transforms of the logits are reduced")
        if name == "max_logit" and attached:
            raise NotRecognised("the gradient of a maximum over the vocabulary is asked for")
        expr = self.pool.call("stat", name)
        self.stats[name] = self.stats.get(name, False) or attached
        return expr if attached else self.pool.call(aten.detach.default, expr)

    def _lse(self, form: Affine | Exp, factor: float) -> RowExpr | None:
        if factor == 0:
            return None
        lse = self.stat("lse", form.transform, form.attached)
        return lse if factor == 1 else self.pool.call(aten.mul.Tensor, lse, factor)

    def add(self, *terms: RowExpr | None) -> RowExpr | None:
        """Sum of ``[n]`` terms; None is zero."""
        total: RowExpr | None = None
        for term in terms:
            if term is not None:
                total = term if total is None else self.pool.call(aten.add.Tensor, total, term)
        return total

    def scale(self, term: RowExpr | None, factor: float) -> RowExpr | None:
        """``factor * term``."""
        if term is None or factor == 1:
            return term
        if factor == -1:
            return self.pool.call(aten.neg.default, term)
        return self.pool.call(aten.mul.Tensor, term, factor)

    # ------------------------------------------------------------------ wide forms
    def form(self, expr: RowExpr, attached: bool = True) -> Form | None:
        """The form of a vocabulary-sized expression; None when it does not involve the head."""
        key = (id(expr), attached)
        if key not in self._forms:
            self._forms[key] = self._form(expr, attached)
        return self._forms[key]

    def _form(self, expr: RowExpr, attached: bool) -> Form | None:
        if expr is self.head:
            bias = expr.args[0] if expr.target is aten.addmm.default else None
            return Affine(Transform(bias=bias), attached=attached)
        if not self.reads_head(expr):
            return None
        if expr.target is aten.detach.default:
            return self.form(expr.args[0], False)
        rule = _FORM_RULES.get(expr.target)
        if rule is None:
            raise NotRecognised(f"{expr.target} over the vocabulary is no part of a log-softmax")
        return rule(self, expr, attached)

    def affine(self, expr: RowExpr, attached: bool) -> Affine:
        """``expr`` as an affine form of the logits."""
        form = self.form(expr, attached)
        if not isinstance(form, Affine):
            raise NotRecognised("an op takes logits or log-probs and gets something else")
        return form

    def unit(self, form: Affine) -> Affine:
        """The same form with ``a = 1``: the factor moves into the transform."""
        if form.a == 1:
            return form
        moved = form.transform.scaled(form.a)
        r = self.add(self.scale(self._lse(form, form.k), form.a), self.scale(form.r, form.a))
        if form.k:
            raise NotRecognised("log-probabilities are scaled before they are normalised again")
        return Affine(moved, 1.0, 0.0, r, form.attached)

    def reads_head(self, expr: RowExpr) -> bool:
        """Whether the head's logits are among what ``expr`` is computed from."""
        seen: set[int] = set()
        stack = [expr]
        while stack:
            part = stack.pop()
            if part is self.head:
                return True
            if id(part) not in seen:
                seen.add(id(part))
                stack.extend(part.operands())
        return False

    # ------------------------------------------------------------------ narrow values
    def narrow(self, expr: RowExpr, attached: bool = True) -> RowExpr:
        """A narrow expression over the op's statistics instead of the vocabulary.

        Raises:
            NotRecognised: it needs another statistic.
        """
        key = (id(expr), attached)
        if key not in self._narrow:
            self._narrow[key] = self._narrowed(expr, attached)
        return self._narrow[key]

    def _narrowed(self, expr: RowExpr, attached: bool) -> RowExpr:
        if expr.leaf is not None or not self.reads_head(expr):
            return expr
        if expr.target is aten.detach.default:
            return self.pool.call(aten.detach.default, self.narrow(expr.args[0], False))
        reduction = _REDUCTIONS.get(expr.target)
        if reduction is not None and self._is_wide(expr.args[0]):
            return reduction(self, expr, attached)
        hit = self._argmax_hit(expr)
        if hit is not None:
            return hit
        for operand in expr.operands():
            if self._is_wide(operand):
                raise NotRecognised(f"{expr.target} over the vocabulary is another statistic")
        args = [self._rebuild(arg, attached) for arg in expr.args]
        kwargs = {name: self._rebuild(value, attached) for name, value in expr.kwargs}
        return self.pool.call(expr.target, *args, **kwargs)

    def _rebuild(self, arg: Any, attached: bool) -> Any:
        if isinstance(arg, RowExpr):
            return self.narrow(arg, attached)
        if isinstance(arg, tuple):
            return tuple(self._rebuild(item, attached) for item in arg)
        return arg

    def _is_wide(self, expr: RowExpr) -> bool:
        """Whether an expression that reads the head still has the vocabulary dim."""
        if expr is self.head:
            return True
        if expr.leaf is not None or not self.reads_head(expr):
            return False
        if expr.target in _REDUCTIONS or expr.target in (aten.argmax.default,):
            return False
        return any(self._is_wide(operand) for operand in expr.operands())

    def _argmax_hit(self, expr: RowExpr) -> RowExpr | None:
        """``argmax(z) == target``."""
        if expr.target is not aten.eq.Tensor:
            return None
        left, right = expr.args
        for best, ids in ((left, right), (right, left)):
            if best.target is aten.argmax.default and not self.reads_head(ids):
                form = self.affine(best.args[0], False)
                if form.a <= 0 or not self.same_target(ids):
                    raise NotRecognised("argmax over the vocabulary is another statistic")
                self.stat("argmax_hit", form.transform, False)
                return self.pool.call("stat", "argmax_hit")
        return None

    def local_sizes(self, expr: RowExpr) -> tuple[int, ...]:
        """Local dims of a vocabulary-sized expression: the vocabulary and dims of size 1."""
        if expr is self.head:
            return (self.vocab,)
        if expr.target is aten.reshape.default:
            return tuple(expr.args[1][1:])
        inner = [self.local_sizes(part) for part in expr.operands() if self._is_wide(part)]
        return max(inner, key=len)

    def vocab_dim(self, expr: RowExpr) -> int:
        """The vocabulary's dim in a vocabulary-sized expression."""
        sizes = self.local_sizes(expr)
        if [size for size in sizes if size != 1] != [self.vocab]:
            raise NotRecognised("the vocabulary is split into several dims")
        return 1 + sizes.index(self.vocab)

    def in_layout(self, value: RowExpr, ones: int) -> RowExpr:
        """``[n]`` with trailing dims of size 1."""
        if not ones:
            return value
        return self.pool.call(aten.reshape.default, value, (-1, *(1,) * ones))

    def per_row(self, expr: RowExpr) -> RowExpr:
        """One number per row, in the ``[n]`` layout of the statistics.

        Raises:
            NotRecognised: there are several per row, such as a mask over the vocabulary.
        """
        if not self.is_single(expr):
            raise NotRecognised("the logits meet a tensor of several entries per token")
        if expr.leaf is not None and not expr.leaf.tiled:
            return expr  # a scalar for all rows
        if expr.target is aten.reshape.default and set(expr.args[1][1:]) <= {1}:
            return self.per_row(expr.args[0])
        if expr.leaf is None and expr.target == "stat":
            return expr
        return self.pool.call(aten.reshape.default, expr, (-1,))

    def is_single(self, expr: RowExpr) -> bool:
        """Whether a narrow expression surely has one entry per row: all it is made of has."""
        if expr.leaf is not None:
            if expr.leaf.tiled:
                return math.prod(expr.leaf.local_sizes) == 1
            return math.prod(map(hint, shape_of(expr.leaf.node))) == 1
        if expr.target == "stat":
            return True
        operands = list(expr.operands())
        if not operands:  # a constant made in the region
            sizes = expr.args[0] if isinstance(expr.args[0], tuple) else (expr.args[0],)
            return math.prod(sizes) == 1
        return all(self.is_single(operand) for operand in operands)

    def one_per_row(self, index: RowExpr) -> bool:
        """Whether an index picks one entry per row, told by the sizes of what it is made of."""
        if index.leaf is not None:
            return index.leaf.tiled and math.prod(index.leaf.local_sizes) == 1
        if index.target is aten.slice.Tensor:
            return False
        parts = [part for part in index.operands() if part.leaf is None or part.leaf.tiled]
        return bool(parts) and all(self.one_per_row(part) for part in parts)

    def same_target(self, index: RowExpr) -> bool:
        """Whether ``index`` are the ids whose log-prob is taken; the first seen are."""
        while index.target is aten.reshape.default:
            index = index.args[0]
        if self.target is None:
            self.target = index
        return self.target is index or _origin(self.target) == _origin(index)


def _origin(index: RowExpr) -> tuple[object, ...] | None:
    """Where ids come from, whatever dims of size 1 they were given on the way."""
    leaf = index.leaf
    if leaf is None or leaf.prepare:
        return (id(index),)
    node = leaf.node
    while is_call(node, aten.unsqueeze.default, aten.squeeze.dim):
        node = node.args[0]  # type: ignore[assignment]
    return (node, str(leaf.steps))


# ---------------------------------------------------------------------- form rules
FormRule = Callable[[LogprobAlgebra, RowExpr, bool], Form]
_FORM_RULES: dict[Any, FormRule] = {}
Reduction = Callable[[LogprobAlgebra, RowExpr, bool], RowExpr]
_REDUCTIONS: dict[Any, Reduction] = {}


def form_rule(*targets: Any) -> Callable[[FormRule], FormRule]:
    """Register what an op makes of forms."""

    def decorate(function: FormRule) -> FormRule:
        _FORM_RULES.update(dict.fromkeys(targets, function))
        return function

    return decorate


def reduction(*targets: Any) -> Callable[[Reduction], Reduction]:
    """Register what a reduction over the vocabulary makes of a form."""

    def decorate(function: Reduction) -> Reduction:
        _REDUCTIONS.update(dict.fromkeys(targets, function))
        return function

    return decorate
