"""Recognise log-probabilities, entropies and similar statistics, however they are written.

``LogprobAlgebra.narrow`` rewrites a narrow row expression (one number per token) over the
vocabulary into one over the statistics of ``fxrl::linear_logprob``. It knows algebra, not idioms:
a softmax that is gathered and then logged, a hand-written stable log-sum-exp and a
``Categorical`` all reduce to the same three forms (``logprob.forms``). What needs another
statistic is not recognised, with the reason; then the general region takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fxrl.analysis.logprob.forms import (
    Affine,
    Exp,
    Form,
    Product,
    Transform,
    as_number,
    finite,
)
from fxrl.analysis.logprob.targets import agree
from fxrl.analysis.rows.expr import ExprPool, RowExpr
from fxrl.ir.graph import bound, numel_hint, shape_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

#: Whether the best token is that of ``args[0]``, ids that may lie outside of the vocabulary.
HIT = "hit"


class LogprobAlgebra:
    """The recogniser for one head, of a vocabulary of ``vocab``."""

    def __init__(self, pool: ExprPool, head: RowExpr, vocab: int) -> None:
        self.pool = pool
        self.head = head
        self.vocab = vocab
        # The ids whose log-prob is taken, ``[n]`` or ``[n, 1]``, once seen, and whether they pick
        # an entry. Else they were compared with alone, and may lie outside of the vocabulary, as
        # labels do that a loss ignores.
        self.target: RowExpr | None = None
        self.picked = False
        self.transform: Transform | None = None  # the logits that all statistics are of, once seen
        self.stats: dict[str, bool] = {}  # name of each one used -> whether it is differentiated
        self._forms: dict[tuple[int, bool], Form] = {}
        self._narrow: dict[tuple[int, bool], RowExpr] = {}
        self._reads: dict[int, bool] = {}

    # ------------------------------------------------------------------ statistics
    def stat(self, name: str, transform: Transform, attached: bool) -> RowExpr:
        """The ``[n]`` expression of a statistic of the op."""
        if self.transform is None:
            self.transform = transform
        if self.transform.key() != transform.key():
            raise Refusal("two different transforms of the logits are reduced")
        if name == "max_logit" and attached:
            raise Refusal("the gradient of a maximum over the vocabulary is asked for")
        expr = self.pool.call("stat", name)
        self.stats[name] = self.stats.get(name, False) or attached
        return expr if attached else self.pool.call(aten.detach.default, expr)

    def lse(self, form: Affine | Exp, factor: float) -> RowExpr | None:
        """``factor`` times the log-sum-exp of a form's logits; None is zero."""
        if factor == 0:
            return None
        lse = self.stat("lse", form.transform, form.attached)
        return lse if factor == 1 else self.pool.call(aten.mul.Tensor, lse, factor)

    def add(self, total: RowExpr, *terms: RowExpr | None) -> RowExpr:
        """Sum of ``[n]`` terms; None is zero."""
        for term in terms:
            if term is not None:
                total = self.pool.call(aten.add.Tensor, total, term)
        return total

    def scale(self, term: RowExpr, factor: float) -> RowExpr:
        if factor == 1:
            return term
        if factor == -1:
            return self.pool.call(aten.neg.default, term)
        return self.pool.call(aten.mul.Tensor, term, factor)

    # ------------------------------------------------------------------ wide forms
    def form(self, expr: RowExpr, attached: bool = True) -> Form:
        """The form of a vocabulary-sized expression of the head's logits."""
        key = (id(expr), attached)
        if key not in self._forms:
            self._forms[key] = self._form(expr, attached)
        return self._forms[key]

    def _form(self, expr: RowExpr, attached: bool) -> Form:
        if expr is self.head:
            bias = expr.args[0] if expr.target is aten.addmm.default else None
            return Affine(Transform(bias=bias), attached=attached)
        if not self.reads_head(expr):
            raise Refusal("an op takes logits or log-probs and gets something else")
        if expr.target is aten.detach.default:
            return self.form(expr.args[0], False)
        rule = _FORM_RULES.get(expr.target)
        if rule is None:
            raise Refusal(f"{expr.target} over the vocabulary is no part of a log-softmax")
        return rule(self, expr, attached)

    def affine(self, expr: RowExpr, attached: bool) -> Affine:
        return _affine(self.form(expr, attached))

    def unit(self, form: Affine) -> Affine:
        """The same form with ``a = 1``: the factor moves into the transform."""
        if form.a == 1:
            return form
        if form.k:
            raise Refusal("log-probabilities are scaled before they are normalised again")
        r = None if form.r is None else self.scale(form.r, form.a)
        return Affine(form.transform.scaled(form.a), 1.0, 0.0, r, form.attached)

    def fitted(self, form: Affine, transform: Transform | None) -> Affine:
        """``a z`` as plain logits of ``transform``, where these are ``a`` times as large as z."""
        if form.a == 1 or form.k:
            return form
        scaled = self.unit(form)
        fits = transform is None or scaled.transform.key() == transform.key()
        return scaled if fits else form

    def reads_head(self, expr: RowExpr) -> bool:
        """Whether the head's logits are among what ``expr`` is computed from."""
        if (key := id(expr)) not in self._reads:
            self._reads[key] = expr is self.head or any(map(self.reads_head, expr.operands()))
        return self._reads[key]

    # ------------------------------------------------------------------ narrow values
    def narrow(self, expr: RowExpr, attached: bool = True) -> RowExpr:
        """A narrow expression over the op's statistics instead of the vocabulary."""
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
        if reduction is not None and self.is_wide(expr.args[0]):
            return reduction(self, expr, attached)
        hit = self._argmax_hit(expr)
        if hit is not None:
            return hit
        for operand in expr.operands():
            if self.is_wide(operand):
                raise Refusal(f"{expr.target} over the vocabulary is another statistic")
        args = [self._rebuild(arg, attached) for arg in expr.args]
        kwargs = {name: self._rebuild(value, attached) for name, value in expr.kwargs}
        return self.pool.call(expr.target, *args, **kwargs)

    def _rebuild(self, arg: Any, attached: bool) -> Any:
        if isinstance(arg, RowExpr):
            return self.narrow(arg, attached)
        if isinstance(arg, tuple):
            return tuple(self._rebuild(item, attached) for item in arg)
        return arg

    def is_wide(self, expr: RowExpr) -> bool:
        """Whether an expression that reads the head still has the vocabulary dim."""
        if expr is self.head:
            return True
        if expr.leaf is not None or not self.reads_head(expr):
            return False
        if expr.target in _REDUCTIONS or expr.target in (aten.argmax.default,):
            return False
        return any(self.is_wide(operand) for operand in expr.operands())

    def _argmax_hit(self, expr: RowExpr) -> RowExpr | None:
        """``argmax(z) == target``."""
        if expr.target is not aten.eq.Tensor:
            return None
        left, right = expr.args
        for best, ids in ((left, right), (right, left)):
            if best.target is aten.argmax.default and not self.reads_head(ids):
                form = self.fitted(self.affine(best.args[0], False), self.transform)
                if form.a <= 0:
                    raise Refusal("argmax over the vocabulary is another statistic")
                self.aim(ids)
                self.stat("argmax_hit", form.transform, False)
                return self.pool.call(HIT, ids)
        return None

    def local_sizes(self, expr: RowExpr) -> tuple[int, ...]:
        """Local dims of a vocabulary-sized expression: the vocabulary and dims of size 1."""
        if expr is self.head:
            return (self.vocab,)
        if expr.target is aten.reshape.default:
            return tuple(expr.args[1][1:])
        inner = [self.local_sizes(part) for part in expr.operands() if self.is_wide(part)]
        return max(inner, key=len)

    def vocab_dim(self, expr: RowExpr) -> int:
        """The vocabulary's dim in a vocabulary-sized expression."""
        sizes = self.local_sizes(expr)
        if [size for size in sizes if size != 1] != [self.vocab]:
            raise Refusal("the vocabulary is split into several dims")
        return 1 + sizes.index(self.vocab)

    def in_layout(self, value: RowExpr, ones: int) -> RowExpr:
        """``[n]`` with trailing dims of size 1."""
        if not ones:
            return value
        return self.pool.call(aten.reshape.default, value, (-1, *(1,) * ones))

    def per_row(self, expr: RowExpr) -> RowExpr:
        """One number per row, in the ``[n]`` layout of the statistics."""
        if not self.is_single(expr):
            raise Refusal("the logits meet a tensor of several entries per token")
        if expr.leaf is not None and not expr.leaf.tiled:
            return expr  # a scalar for all rows
        if expr.target is aten.reshape.default and set(expr.args[1][1:]) <= {1}:
            return self.per_row(expr.args[0])
        if expr.leaf is None and expr.target == "stat":
            return expr
        return self.pool.call(aten.reshape.default, expr, (-1,))

    def is_single(self, expr: RowExpr) -> bool:
        """Whether a narrow expression certainly has one entry per row, as all its operands have."""
        if expr.leaf is not None:
            if expr.leaf.tiled:
                return math.prod(expr.leaf.local_sizes) == 1
            return numel_hint(expr.leaf.node) == 1
        if expr.target in ("stat", HIT):
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

    def aim(self, ids: RowExpr) -> None:
        """Note that ``ids`` are those whose log-prob is taken. Raises ``Refusal`` if others were
        noted; they may differ outside of the vocabulary, as labels do that a loss ignores."""
        while ids.target is aten.reshape.default:
            ids = ids.args[0]
        if self.target is not None and agree(self.target, ids, self.vocab, picked=self.picked):
            return
        if self.target is not None and (
            self.picked or not agree(ids, self.target, self.vocab, picked=False)
        ):
            raise Refusal("log-probs of two different targets are taken")
        self.target = ids


def _affine(form: Form) -> Affine:
    if not isinstance(form, Affine):
        raise Refusal("an op takes logits or log-probs and gets something else")
    return form


# ---------------------------------------------------------------------- what an op makes of forms
def _same(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    return algebra.form(expr.args[0], attached)


def _slice(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    raise Refusal("a slice of the vocabulary is taken")


def _reshape(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    """A view that adds or drops dims of size 1, such as a batch of one."""
    if [size for size in algebra.local_sizes(expr) if size != 1] != [algebra.vocab]:
        raise Refusal("a view splits the vocabulary")
    return algebra.form(expr.args[0], attached)


def _clamp(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    """A clamp to the dtype's own range, as distributions do, changes nothing."""
    given = bound(expr)
    low = as_number(given["min"])
    if given["max"] is not None or low is None or low > torch.finfo(torch.float16).min:
        raise Refusal("the logits are clamped")
    return algebra.affine(expr.args[0], attached)


def _log_softmax(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    return Affine(form.transform, 1.0, -1.0, None, form.attached)


def _softmax(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    return Exp(form.transform, -1.0, None, form.attached)


def _exp(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    return Exp(form.transform, form.k, form.r, form.attached)


def _log(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.form(expr.args[0], attached)
    if not isinstance(form, Exp) or form.c != 1:
        raise Refusal("a logarithm of something that is no probability")
    return Affine(form.transform, 1.0, form.k, form.r, form.attached)


def _tanh(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    """``tanh(scale * x / cap)``: a softcap whose outer factor comes next."""
    form = algebra.affine(expr.args[0], attached)
    transform = form.transform
    plain = form.k == 0 and form.r is None and not transform.softcap
    if not plain or transform.temperature is not None:
        raise Refusal("a tanh of something that is not scaled logits")
    # tanh(y) = softcap * tanh(scale' x / softcap) / divisor with softcap = divisor = 1
    capped = replace(transform, scale=transform.scale * form.a, softcap=1.0)
    return Affine(capped, 1.0, 0.0, None, form.attached)


def _neg(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    return _times(algebra.form(expr.args[0], attached), -1.0)


def _times(form: Form, factor: float) -> Form:
    if not finite(factor):
        raise Refusal(f"the logits are multiplied by {factor}")
    if isinstance(form, Affine):
        plain = form.k == 0 and form.r is None
        if plain and form.transform.softcap and form.transform.divisor == 1 and form.a == 1:
            # cap * tanh(.): fold the factor into softcap, keeping what is inside the tanh
            cap = form.transform.softcap * factor
            if factor > 0:
                inner = form.transform.scale * factor
                return replace(form, transform=replace(form.transform, softcap=cap, scale=inner))
        return replace(form, a=form.a * factor)
    return replace(form, c=form.c * factor)


def _mul(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    left, right = expr.args
    for wide, factor in ((left, right), (right, left)):
        number = as_number(factor)
        if number is not None:
            return _times(algebra.form(wide, attached), number)
    if not (algebra.reads_head(left) and algebra.reads_head(right)):
        raise Refusal("the logits are multiplied by a tensor")
    return _product(algebra.form(left, attached), algebra.form(right, attached))


def _product(left: Form, right: Form) -> Form:
    if isinstance(right, Exp) and not isinstance(left, Exp):
        left, right = right, left
    if not isinstance(left, Exp) or not isinstance(right, (Affine, Exp)):
        raise Refusal("a product over the vocabulary that is no entropy")
    if left.attached != right.attached:
        raise Refusal("a product of a detached and a differentiated factor")
    return Product(left, right)


def _power(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.form(expr.args[0], attached)
    if as_number(expr.args[1]) != 2 or not isinstance(form, Exp):
        raise Refusal("a power over the vocabulary other than p^2")
    return Product(form, form)


def _div(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    wide, divisor = expr.args
    number = as_number(divisor)
    if number is not None:
        return _times(algebra.form(wide, attached), 1.0 / number)
    if algebra.reads_head(divisor):
        return _normalised(algebra, algebra.form(wide, attached), divisor, attached)
    form = algebra.affine(wide, attached)
    if form.k or form.r is not None or form.transform.temperature is not None:
        raise Refusal("log-probabilities are divided by a tensor")
    transform = form.transform if form.a == 1 else form.transform.scaled(form.a)
    return Affine(
        replace(transform, temperature=algebra.per_row(divisor)), 1.0, 0.0, None, form.attached
    )


def _normalised(algebra: LogprobAlgebra, form: Form, divisor: RowExpr, attached: bool) -> Form:
    """``exp(z + r) / sum(exp(z + r))``: a hand-written softmax."""
    while divisor.target is aten.reshape.default:
        divisor = divisor.args[0]
    if isinstance(form, Exp) and divisor.target is aten.sum.dim_IntList:
        total = algebra.form(divisor.args[0], attached)
        if isinstance(total, Exp) and total is form:
            return Exp(form.transform, -1.0, None, form.attached)
    raise Refusal("a vocabulary-sized value is divided by a statistic of another")


def _add(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    left, right = expr.args
    sign = -1.0 if expr.target is aten.sub.Tensor else 1.0
    alpha = as_number(bound(expr)["alpha"])
    if alpha is None:
        raise Refusal("an addition whose alpha is no number")
    sign *= alpha
    if not algebra.reads_head(left):
        return _shifted(algebra, algebra.affine(right, attached), left, attached, sign, True)
    return _shifted(algebra, algebra.affine(left, attached), right, attached, sign, False)


def _shifted(
    algebra: LogprobAlgebra, form: Affine, other: Any, attached: bool, sign: float, flipped: bool
) -> Form:
    """``form + sign * other``, or ``other + sign * form`` when flipped."""
    if flipped:
        form, sign = replace(form, a=form.a * sign), 1.0
    if as_number(other) is not None:
        raise Refusal("a number is added to the logits")
    if algebra.reads_head(other) and algebra.is_wide(other):
        raise Refusal("two vocabulary-sized values are added")
    if not algebra.reads_head(other) and _is_vocab_vector(algebra, other):
        return _biased(algebra, form, other, sign)
    row = algebra.per_row(algebra.narrow(other, attached))
    form = algebra.fitted(form, algebra.transform)
    row = algebra.scale(row, sign / form.a)
    return replace(form, r=row if form.r is None else algebra.add(form.r, row))


def _is_vocab_vector(algebra: LogprobAlgebra, expr: RowExpr) -> bool:
    """Whether every row reads the same ``[V]`` numbers; dims of size 1 do not matter."""
    if expr.target is aten.reshape.default:
        expr = expr.args[0]
    if expr.leaf is None or expr.leaf.tiled:
        return False
    return [size for size in shape_of(expr.leaf.node) if size != 1] == [algebra.vocab]


def _biased(algebra: LogprobAlgebra, form: Affine, vector: RowExpr, sign: float) -> Form:
    transform = form.transform
    plain = form.k == 0 and form.r is None and form.a == 1 and transform.scale == 1
    if not plain or transform.bias is not None or transform.softcap or sign != 1:
        raise Refusal("a vector over the vocabulary is added after a transform")
    if transform.temperature is not None:
        raise Refusal("a vector over the vocabulary is added after the temperature")
    if vector.target is aten.reshape.default:
        vector = vector.args[0]
    if len(shape_of(vector.leaf.node)) != 1:  # type: ignore[union-attr]
        vector = algebra.pool.call(aten.reshape.default, vector, (algebra.vocab,))
    return replace(form, transform=replace(transform, bias=vector))


# ---------------------------------------------------------------------- reductions of forms
Reduction = Callable[[LogprobAlgebra, RowExpr, bool], RowExpr]


def _over_vocab(of: Callable[[LogprobAlgebra, Form], RowExpr]) -> Reduction:
    """``of`` a form, ``[n]``, as a reduction over the vocabulary alone."""

    def reduced(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
        source, given = expr.args[0], bound(expr)
        dims = given["dim"] if isinstance(given["dim"], (tuple, list)) else (given["dim"],)
        rank = 1 + len(algebra.local_sizes(source))
        if [d % rank for d in dims] != [algebra.vocab_dim(source)]:
            raise Refusal("a reduction over other dims than the vocabulary")
        value = of(algebra, algebra.form(source, attached))
        return algebra.in_layout(value, rank - 1 - (not given["keepdim"]))

    return reduced


def _exponent(algebra: LogprobAlgebra, form: Affine | Exp) -> RowExpr:
    """``(1 + k) lse + r``, the logarithm of ``sum_v exp(z + k lse + r)``."""
    terms = [t for t in (algebra.lse(form, 1 + form.k), form.r) if t is not None]
    if terms:
        return algebra.add(*terms)
    return algebra.pool.call(aten.zeros_like.default, algebra.stat("lse", form.transform, False))


def _logsumexp(algebra: LogprobAlgebra, form: Form) -> RowExpr:
    return _exponent(algebra, algebra.unit(_affine(form)))


def _sum(algebra: LogprobAlgebra, form: Form) -> RowExpr:
    if isinstance(form, Affine):
        return algebra.scale(_mean(algebra, form), float(algebra.vocab))
    total = _mass(algebra, form) if isinstance(form, Exp) else _product_total(algebra, form)
    return algebra.scale(total, form.c)


def _mass(algebra: LogprobAlgebra, form: Exp) -> RowExpr:
    """``sum_v exp(z + k lse + r)``."""
    return algebra.pool.call(aten.exp.default, _exponent(algebra, form))


def _product_total(algebra: LogprobAlgebra, form: Product) -> RowExpr:
    left, right = form.left, form.right
    if isinstance(right, Exp):
        if not (left.is_probability and right.is_probability):
            raise Refusal("a sum of products of unnormalised probabilities")
        _same_logits(left, right)
        return algebra.stat("sum_p2", left.transform, left.attached)
    right = algebra.fitted(right, left.transform)
    _same_logits(left, right)
    entropy = algebra.stat("entropy", left.transform, left.attached)
    negative = algebra.pool.call(aten.neg.default, entropy)
    # E_p[z + k lse + r] = (1 + k) lse + r - entropy
    mean = algebra.add(negative, algebra.lse(right, 1 + right.k), right.r)
    mean = algebra.scale(mean, right.a)
    if left.is_probability:
        return mean
    mass = algebra.scale(_mass(algebra, left), left.c)
    return algebra.pool.call(aten.mul.Tensor, mass, mean)


def _same_logits(left: Exp, right: Affine | Exp) -> None:
    if left.transform.key() != right.transform.key():
        raise Refusal("two different transforms of the logits are reduced together")


def _mean(algebra: LogprobAlgebra, form: Form) -> RowExpr:
    form = algebra.fitted(_affine(form), algebra.transform)
    mean = algebra.stat("mean_logit", form.transform, form.attached)
    return algebra.scale(algebra.add(mean, algebra.lse(form, form.k), form.r), form.a)


def _amax(algebra: LogprobAlgebra, form: Form) -> RowExpr:
    form = algebra.fitted(_affine(form), algebra.transform)
    if form.a <= 0:
        raise Refusal("a minimum over the vocabulary")
    top = algebra.stat("max_logit", form.transform, form.attached)
    top = algebra.add(top, algebra.lse(form, form.k), form.r)
    return algebra.scale(top, form.a)


def _gather(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
    source, dim, index = expr.args
    if dim % (1 + len(algebra.local_sizes(source))) != algebra.vocab_dim(source):
        raise Refusal("a gather over other dims than the vocabulary")
    if algebra.reads_head(index) or not algebra.one_per_row(index):
        raise Refusal("several entries per token are gathered")
    form = algebra.form(source, attached)
    algebra.aim(index)
    algebra.picked = True
    if isinstance(form, Affine):
        value = _picked(algebra, form)
    elif isinstance(form, Exp):
        exponent = _picked(algebra, Affine(form.transform, 1.0, form.k, form.r, form.attached))
        value = algebra.scale(algebra.pool.call(aten.exp.default, exponent), form.c)
    else:
        raise Refusal("an entry of a product over the vocabulary is gathered")
    return algebra.in_layout(value, len(algebra.local_sizes(source)))


def _picked(algebra: LogprobAlgebra, form: Affine) -> RowExpr:
    """``a (z_y + k lse + r) = a (logprob + (1 + k) lse + r)``."""
    form = algebra.fitted(form, algebra.transform)
    logprob = algebra.stat("logprob", form.transform, form.attached)
    return algebra.scale(algebra.add(logprob, algebra.lse(form, 1 + form.k), form.r), form.a)


# ---------------------------------------------------------------------- the ops that are known
FormRule = Callable[[LogprobAlgebra, RowExpr, bool], Form]
_FORM_RULES: dict[Any, FormRule] = {
    aten._to_copy.default: _same,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.slice.Tensor: _slice,
    aten.reshape.default: _reshape,
    aten.clamp.default: _clamp,
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten.exp.default: _exp,
    aten.log.default: _log,
    aten.tanh.default: _tanh,
    aten.neg.default: _neg,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.pow.Tensor_Scalar: _power,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
}
_REDUCTIONS: dict[Any, Reduction] = {
    aten.logsumexp.default: _over_vocab(_logsumexp),
    aten.sum.dim_IntList: _over_vocab(_sum),
    aten.mean.dim: _over_vocab(_mean),
    aten.amax.default: _over_vocab(_amax),
    aten.gather.default: _gather,
}
