"""The reductions of the log-prob algebra: what a form summed, gathered or maximised becomes."""

from __future__ import annotations

import torch

from fxrl.analysis.logprob.algebra import LogprobAlgebra, reduction
from fxrl.analysis.logprob.forms import Affine, Exp, Form, NotRecognised, Product
from fxrl.analysis.rows.expr import RowExpr

aten = torch.ops.aten


def _vocab_dim_only(algebra: LogprobAlgebra, expr: RowExpr) -> None:
    dims = expr.args[1] if len(expr.args) > 1 else dict(expr.kwargs).get("dim")
    dims = dims if isinstance(dims, tuple) else (dims,)
    rank = 1 + len(algebra.local_sizes(expr.args[0]))
    if [d % rank for d in dims] != [algebra.vocab_dim(expr.args[0])]:
        raise NotRecognised("a reduction over other dims than the vocabulary")


def _keep(algebra: LogprobAlgebra, expr: RowExpr, value: RowExpr) -> RowExpr:
    """``[n]`` in the layout of the reduction: its other local dims, which have size 1."""
    keepdim = expr.args[2] if len(expr.args) > 2 else dict(expr.kwargs).get("keepdim", False)
    ones = len(algebra.local_sizes(expr.args[0])) - (not keepdim)
    return algebra.in_layout(value, ones)


def _zero(algebra: LogprobAlgebra, form: Affine | Exp) -> RowExpr:
    lse = algebra.stat("lse", form.transform, False)
    return algebra.pool.call(aten.zeros_like.default, lse)


@reduction(aten.logsumexp.default)
def _logsumexp(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
    _vocab_dim_only(algebra, expr)
    form = algebra.unit(algebra.affine(expr.args[0], attached))
    total = algebra.add(algebra._lse(form, 1 + form.k), form.r)
    return _keep(algebra, expr, total if total is not None else _zero(algebra, form))


@reduction(aten.sum.dim_IntList)
def _sum(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
    _vocab_dim_only(algebra, expr)
    form = algebra.form(expr.args[0], attached)
    assert form is not None
    return _keep(algebra, expr, _total(algebra, form))


def _total(algebra: LogprobAlgebra, form: Form) -> RowExpr:
    if isinstance(form, Affine):
        result = algebra.scale(_mean_of(algebra, form), float(algebra.vocab))
    elif isinstance(form, Exp):
        result = algebra.scale(_mass(algebra, form), form.c)
    else:
        result = algebra.scale(_product_total(algebra, form), form.c)
    assert result is not None
    return result


def _mass(algebra: LogprobAlgebra, form: Exp) -> RowExpr:
    """``sum_v exp(z + k lse + r) = exp((1 + k) lse + r)``."""
    exponent = algebra.add(algebra._lse(form, 1 + form.k), form.r)
    exponent = exponent if exponent is not None else _zero(algebra, form)
    return algebra.pool.call(aten.exp.default, exponent)


def _product_total(algebra: LogprobAlgebra, form: Product) -> RowExpr:
    left, right = form.left, form.right
    if isinstance(right, Exp):
        if not (left.is_probability and right.is_probability):
            raise NotRecognised("a sum of products of unnormalised probabilities")
        _same_logits(left, right)
        return algebra.stat("sum_p2", left.transform, left.attached)
    _same_logits(left, right)
    entropy = algebra.stat("entropy", left.transform, left.attached)
    negative = algebra.pool.call(aten.neg.default, entropy)
    # E_p[z + k lse + r] = (1 + k) lse + r - entropy
    mean = algebra.add(negative, algebra._lse(right, 1 + right.k), right.r)
    mean = algebra.scale(mean, right.a)
    assert mean is not None
    if left.is_probability:
        return mean
    mass = algebra.scale(_mass(algebra, left), left.c)
    return algebra.pool.call(aten.mul.Tensor, mass, mean)


def _same_logits(left: Exp, right: Affine | Exp) -> None:
    if left.transform.key() != right.transform.key():
        raise NotRecognised("two different transforms of the logits are reduced together")


@reduction(aten.mean.dim)
def _mean(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
    _vocab_dim_only(algebra, expr)
    return _keep(algebra, expr, _mean_of(algebra, algebra.affine(expr.args[0], attached)))


def _mean_of(algebra: LogprobAlgebra, form: Affine) -> RowExpr:
    mean = algebra.stat("mean_logit", form.transform, form.attached)
    result = algebra.scale(algebra.add(mean, algebra._lse(form, form.k), form.r), form.a)
    assert result is not None
    return result


@reduction(aten.amax.default)
def _amax(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
    _vocab_dim_only(algebra, expr)
    form = algebra.affine(expr.args[0], attached)
    if form.a <= 0:
        raise NotRecognised("a minimum over the vocabulary")
    top = algebra.stat("max_logit", form.transform, form.attached)
    result = algebra.scale(algebra.add(top, algebra._lse(form, form.k), form.r), form.a)
    assert result is not None
    return _keep(algebra, expr, result)


@reduction(aten.gather.default)
def _gather(algebra: LogprobAlgebra, expr: RowExpr, attached: bool) -> RowExpr:
    source, dim, index = expr.args
    if dim % (1 + len(algebra.local_sizes(source))) != algebra.vocab_dim(source):
        raise NotRecognised("a gather over other dims than the vocabulary")
    if algebra.reads_head(index) or not algebra.one_per_row(index):
        raise NotRecognised("several entries per token are gathered")
    form = algebra.form(source, attached)
    if not algebra.same_target(index):
        raise NotRecognised("log-probs of two different targets are taken")
    if isinstance(form, Affine):
        value = _picked(algebra, form)
    elif isinstance(form, Exp):
        exponent = _picked(algebra, Affine(form.transform, 1.0, form.k, form.r, form.attached))
        found = algebra.scale(algebra.pool.call(aten.exp.default, exponent), form.c)
        assert found is not None
        value = found
    else:
        raise NotRecognised("an entry of a product over the vocabulary is gathered")
    return algebra.in_layout(value, len(algebra.local_sizes(source)))


def _picked(algebra: LogprobAlgebra, form: Affine) -> RowExpr:
    """``a (z_y + k lse + r) = a (logprob + (1 + k) lse + r)``."""
    logprob = algebra.stat("logprob", form.transform, form.attached)
    total = algebra.add(logprob, algebra._lse(form, 1 + form.k), form.r)
    result = algebra.scale(total, form.a)
    assert result is not None
    return result
