"""The elementwise rules of the log-prob algebra: what an op makes of forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxrl.analysis.logprob.algebra import (
    LogprobAlgebra,
    form_rule,
)
from fxrl.analysis.logprob.forms import (
    Affine,
    Exp,
    Form,
    NotRecognised,
    Product,
    as_number,
    finite,
)
from fxrl.analysis.rows.expr import RowExpr
from fxrl.ir.graph import shape_of

aten = torch.ops.aten


# ---------------------------------------------------------------------- elementwise
@form_rule(aten._to_copy.default, aten.clone.default, aten.alias.default, aten.slice.Tensor)
def _same(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    if expr.target is aten.slice.Tensor:
        raise NotRecognised("a slice of the vocabulary is taken")
    form = algebra.form(expr.args[0], attached)
    assert form is not None
    return form


@form_rule(aten.reshape.default)
def _reshape(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    """A view that adds or drops dims of size 1, such as a batch of one."""
    if [size for size in algebra.local_sizes(expr) if size != 1] != [algebra.vocab]:
        raise NotRecognised("a view splits the vocabulary")
    form = algebra.form(expr.args[0], attached)
    assert form is not None
    return form


@form_rule(aten.clamp.default)
def _clamp(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    """A clamp to the dtype's own range, as distributions do, changes nothing."""
    low = as_number(expr.args[1]) if len(expr.args) > 1 else as_number(dict(expr.kwargs).get("min"))
    upper = expr.args[2] if len(expr.args) > 2 else dict(expr.kwargs).get("max")
    if upper is not None or low is None or low > torch.finfo(torch.float16).min:
        raise NotRecognised("the logits are clamped")
    return algebra.affine(expr.args[0], attached)


@form_rule(aten._log_softmax.default)
def _log_softmax(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    return Affine(form.transform, 1.0, -1.0, None, form.attached)


@form_rule(aten._softmax.default)
def _softmax(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    return Exp(form.transform, -1.0, None, form.attached)


@form_rule(aten.exp.default)
def _exp(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    return Exp(form.transform, form.k, form.r, form.attached)


@form_rule(aten.log.default)
def _log(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.form(expr.args[0], attached)
    if not isinstance(form, Exp) or form.c != 1:
        raise NotRecognised("a logarithm of something that is no probability")
    return Affine(form.transform, 1.0, form.k, form.r, form.attached)


@form_rule(aten.tanh.default)
def _tanh(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    """``tanh(scale * x / cap)``: a softcap whose outer factor comes next."""
    form = algebra.affine(expr.args[0], attached)
    transform = form.transform
    plain = form.k == 0 and form.r is None and not transform.softcap
    if not plain or transform.temperature is not None:
        raise NotRecognised("a tanh of something that is not scaled logits")
    # tanh(y) = softcap * tanh(scale' x / softcap) / divisor with softcap = divisor = 1
    capped = replace(transform, scale=transform.scale * form.a, softcap=1.0)
    return Affine(capped, 1.0, 0.0, None, form.attached)


@form_rule(aten.neg.default)
def _neg(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    return _times(algebra.form(expr.args[0], attached), -1.0)


def _times(form: Form | None, factor: float) -> Form:
    if not finite(factor):
        raise NotRecognised(f"the logits are multiplied by {factor}")
    if isinstance(form, Affine):
        plain = form.k == 0 and form.r is None
        if plain and form.transform.softcap and form.transform.divisor == 1 and form.a == 1:
            # cap * tanh(.): fold the factor into softcap, keeping what is inside the tanh
            cap = form.transform.softcap * factor
            if factor > 0:
                inner = form.transform.scale * factor
                return replace(form, transform=replace(form.transform, softcap=cap, scale=inner))
        return replace(form, a=form.a * factor)
    assert isinstance(form, (Exp, Product))
    return replace(form, c=form.c * factor)


@form_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    left, right = expr.args
    for wide, factor in ((left, right), (right, left)):
        number = as_number(factor)
        if number is not None:
            return _times(algebra.form(wide, attached), number)
    if not (algebra.reads_head(left) and algebra.reads_head(right)):
        raise NotRecognised("the logits are multiplied by a tensor")
    return _product(algebra.form(left, attached), algebra.form(right, attached))


def _product(left: Form | None, right: Form | None) -> Form:
    if isinstance(right, Exp) and not isinstance(left, Exp):
        left, right = right, left
    if not isinstance(left, Exp) or not isinstance(right, (Affine, Exp)):
        raise NotRecognised("a product over the vocabulary that is no entropy")
    if left.attached != right.attached:
        raise NotRecognised("a product of a detached and a differentiated factor")
    return Product(left, right)


@form_rule(aten.pow.Tensor_Scalar)
def _power(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    form = algebra.form(expr.args[0], attached)
    if as_number(expr.args[1]) != 2 or not isinstance(form, Exp):
        raise NotRecognised("a power over the vocabulary other than p^2")
    return Product(form, form)


@form_rule(aten.div.Tensor, aten.div.Scalar)
def _div(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    wide, divisor = expr.args
    number = as_number(divisor)
    if number is not None:
        return _times(algebra.form(wide, attached), 1.0 / number)
    if algebra.reads_head(divisor):
        return _normalised(algebra, algebra.form(wide, attached), divisor, attached)
    form = algebra.affine(wide, attached)
    if form.k or form.r is not None or form.transform.temperature is not None:
        raise NotRecognised("log-probabilities are divided by a tensor")
    transform = form.transform if form.a == 1 else form.transform.scaled(form.a)
    return Affine(
        replace(transform, temperature=algebra.per_row(divisor)), 1.0, 0.0, None, form.attached
    )


def _normalised(
    algebra: LogprobAlgebra, form: Form | None, divisor: RowExpr, attached: bool
) -> Form:
    """``exp(z + r) / sum(exp(z + r))``: a hand-written softmax."""
    while divisor.target is aten.reshape.default:
        divisor = divisor.args[0]
    if isinstance(form, Exp) and divisor.target is aten.sum.dim_IntList:
        total = algebra.form(divisor.args[0], attached)
        if isinstance(total, Exp) and total is form:
            return Exp(form.transform, -1.0, None, form.attached)
    raise NotRecognised("a vocabulary-sized value is divided by a statistic of another")


@form_rule(aten.add.Tensor, aten.sub.Tensor)
def _add(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> Form:
    left, right = expr.args
    sign = -1.0 if expr.target is aten.sub.Tensor else 1.0
    alpha = as_number(dict(expr.kwargs).get("alpha", 1))
    if alpha is None:
        raise NotRecognised("an addition whose alpha is no number")
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
        raise NotRecognised("a number is added to the logits")
    if algebra.reads_head(other) and algebra._is_wide(other):
        raise NotRecognised("two vocabulary-sized values are added")
    if not algebra.reads_head(other) and _is_vocab_vector(algebra, other):
        return _biased(algebra, form, other, sign)
    row = algebra.narrow(other, attached)
    row = algebra.per_row(row)
    return replace(form, r=algebra.add(form.r, algebra.scale(row, sign / form.a)))


def _is_vocab_vector(algebra: LogprobAlgebra, expr: RowExpr) -> bool:
    """Whether every row reads the same ``[V]`` numbers, whatever dims of size 1 they have."""
    if expr.target is aten.reshape.default:
        expr = expr.args[0]
    if expr.leaf is None or expr.leaf.tiled:
        return False
    return [size for size in shape_of(expr.leaf.node) if size != 1] == [algebra.vocab]


def _biased(algebra: LogprobAlgebra, form: Affine, vector: RowExpr, sign: float) -> Form:
    transform = form.transform
    plain = form.k == 0 and form.r is None and form.a == 1 and transform.scale == 1
    if not plain or transform.bias is not None or transform.softcap or sign != 1:
        raise NotRecognised("a vector over the vocabulary is added after a transform")
    if transform.temperature is not None:
        raise NotRecognised("a vector over the vocabulary is added after the temperature")
    if vector.target is aten.reshape.default:
        vector = vector.args[0]
    if len(shape_of(vector.leaf.node)) != 1:  # type: ignore[union-attr]
        vector = algebra.pool.call(aten.reshape.default, vector, (algebra.vocab,))
    return replace(form, transform=replace(transform, bias=vector))
