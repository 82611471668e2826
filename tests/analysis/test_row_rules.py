"""Row rules: each op on whole tensors against its row program on permuted rows."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.analysis.layers import is_product
from fxrl.analysis.rows.analysis import HeadSite, analyse
from fxrl.analysis.rows.emit import RowEmitter, body_graph
from fxrl.analysis.rows.heads import find_heads
from fxrl.ir.graph import IS_PART, inputs_of, topological_sort
from fxrl.ir.graph_pass import Miss
from tests.passes.lowered import lowered

ROWS, VOCAB, FEATURES = 6, 17, 4


class Inputs(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor
    row: torch.Tensor
    vector: torch.Tensor


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, FEATURES, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, FEATURES, generator=g, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (ROWS,), generator=g)
    row = torch.randn(ROWS, generator=g, dtype=torch.float64)
    vector = torch.randn(VOCAB, generator=g, dtype=torch.float64)
    return Inputs(hidden, weight, ids, row, vector)


def written(z, where):
    z = z.clone()
    z[where] = 3.0
    return z


def entries(buffer, z):
    buffer[0, 1:3] = z[:2]
    buffer[2] = z[2:]
    buffer[0] = z[1:5]
    return buffer


#: family -> functions of (logits [n, V], the other inputs) to narrow values [n] or [n, k]
FAMILIES = {
    "pointwise": [
        lambda z, x: (z.tanh() * x.row[:, None] + x.vector).sum(-1),
        lambda z, x: torch.where(x.vector > 0, z, -1.0).sum(-1),
        lambda z, x: (z.masked_fill(x.vector > 0, 2.0).exp() - 1).sum(-1),
        lambda z, x: F.logsigmoid(z).sum(-1) + F.mse_loss(z, z * 2, reduction="none").sum(-1),
    ],
    "reduction": [
        lambda z, x: z.sum(-1) + z.mean(1) + z.amax(-1) + z.amin(1) + z.logsumexp(-1),
        lambda z, x: z.var(-1) + z.std(-1) + z.norm(dim=-1) + z.prod(-1) + z.sqrt().nansum(-1),
        lambda z, x: z.max(-1)[0] + z.median(-1)[0] + z.kthvalue(5, -1)[0],
        lambda z, x: z.argmax(-1) + z.min(-1)[1] + (z > 0).any(-1) + (z > -9).all(-1),
    ],
    "whole row": [
        lambda z, x: (z.softmax(-1) * z.log_softmax(-1)).sum(-1),
        lambda z, x: z.topk(3, -1)[0],
        lambda z, x: z.sort(-1)[0][:, 2] + z.cumsum(-1)[:, 5] + z.logcumsumexp(-1)[:, 4],
        lambda z, x: z.flip(-1).roll(2, -1)[:, 0] + F.layer_norm(z, (VOCAB,))[:, 1],
        lambda z, x: F.pad(z, (1, 2), value=3.0)[:, 0:4].sum(-1),
    ],
    "layout": [
        lambda z, x: z.view(2, 3, VOCAB).transpose(0, 1).amax(-1),
        lambda z, x: z.t().amax(0),
        lambda z, x: z[1:-1].unsqueeze(1).expand(-1, 2, -1).amax(-1),
        lambda z, x: torch.cat([z[:, 3:], z * 2], -1).logsumexp(-1),
        lambda z, x: torch.stack([z, z + 1]).amax(0).sum(-1),
        lambda z, x: torch.stack([part.amax(-1) for part in z.split(2)]),
        lambda z, x: z.chunk(2, -1)[0].amax(-1),
        lambda z, x: F.pad(z[:-1].tanh() / 2, (0, 0, 1, 0)).softmax(-1)[:, 2],
        lambda z, x: torch.cat([z.new_zeros(1, VOCAB), -z[2:], torch.zeros_like(z[:2])]).amax(-1),
    ],
    "joins": [
        lambda z, x: torch.stack([z[1:4], z[:3], z[3:]]).amax(-1),
        lambda z, x: torch.cat([z[4:] * 2, z[1:3] * 2, torch.zeros_like(z[:2])]).amax(-1),
        lambda z, x: torch.stack([z[:4], torch.zeros_like(z[:4]), z[2:]], 1)[1:].softmax(-1)[
            ..., 2
        ],
        lambda z, x: torch.cat([z.new_ones(1, VOCAB).bool(), z[2:] + x.vector]).amax(-1),
        lambda z, x: F.pad(z.masked_fill(x.vector > 1, -9.0).log_softmax(-1), (0, 0, 1, 2))[1:].sum(
            -1
        ),
        lambda z, x: torch.nn.utils.rnn.pad_sequence(z.split([1, 5])).exp().sum(-1),
        lambda z, x: entries(z.new_full((3, 4, VOCAB), -1.0), z + x.vector).amax(-1),
        lambda z, x: entries(z.new_empty(3, 4, VOCAB).zero_(), z)[0, 1:3].amax(-1),
    ],
    "indexing": [
        lambda z, x: z.gather(-1, x.ids[:, None])[:, 0],
        lambda z, x: z[torch.arange(ROWS), x.ids],
        lambda z, x: z[[4, 0, 4]].amax(-1),
        lambda z, x: z.index_select(0, x.ids % ROWS).amax(-1),
        lambda z, x: z[:, [2, 9]].sum(-1),
        lambda z, x: z[2:4, 5:9].amax(-1),
        lambda z, x: z[2].argmax() + z[3].amax() + z[4].sum(),
    ],
    "writes": [
        lambda z, x: z.scatter(-1, x.ids[:, None], -5.0).logsumexp(-1),
        lambda z, x: z.slice_scatter(z[:, 2:9] * 2, 1, 2, 9).sum(-1),
        lambda z, x: written(z, (slice(None), x.vector > 0)).sum(-1),
        lambda z, x: written(z, (x.row > 0)).sum(-1),
        lambda z, x: written(z, (slice(None), slice(3, 9))).sum(-1),
    ],
    "products": [
        lambda z, x: torch.einsum("nv,nv->n", z, z.softmax(-1)),
        lambda z, x: z.softmax(-1) @ x.vector,
        lambda z, x: torch.einsum("nv,nv->n", z, F.one_hot(x.ids, VOCAB).to(z.dtype)),
        lambda z, x: z.softmax(-1) @ x.weight,
    ],
}
CASES = [(family, index) for family, found in FAMILIES.items() for index in range(len(found))]


def program_of(function):
    """The lowered graph of ``function`` over the logits of one head."""

    def loss(hidden, weight, ids, row, vector):
        x = Inputs(hidden, weight, ids, row, vector)
        z = F.linear(hidden, weight)
        return function(z, x) + 0.0, z.logsumexp(-1)  # the lse makes it a head in any case

    x = inputs()
    gm = lowered(loss, *x)
    return gm


class Evaluate(torch.fx.Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, gm):
        super().__init__(gm, garbage_collect_values=False)

    def values(self, *args):
        self.run(*args)
        return self.env


def bound(gm, x):
    names = [node.name for node in inputs_of(gm.graph)]
    return [next(v for key, v in x._asdict().items() if key in name) for name in names]


def evaluate(gm, program, args, order=None):
    """The program's outputs on its rows, in the given order, without tiles or regions."""
    with gm.graph.inserting_before(next(iter(gm.graph.find_nodes(op="output")))):
        feeds = RowEmitter(gm.graph).inputs(program.roots)
    topological_sort(gm.graph)
    gm.recompile()
    env = Evaluate(gm).values(*args)
    values = []
    for _, leaf, node in feeds:
        value = env[node]
        values.append(value[order] if order is not None and leaf.tiled else value)
    body = body_graph(program.roots, [expr for expr, _, _ in feeds])
    rows = next(v.shape[0] for (_, leaf, _), v in zip(feeds, values, strict=True) if leaf.tiled)
    return env, body(*values), rows


@pytest.mark.parametrize(("family", "index"), CASES)
def test_rows_are_independent_and_right(family, index):
    gm = program_of(FAMILIES[family][index])
    (site,) = analyse(gm.graph)
    assert isinstance(site, HeadSite), getattr(site, "refusal", site)
    for program in site.programs:
        x = inputs(seed=7)
        env, found, rows = evaluate(gm, program, bound(gm, x))
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(index))
        _, permuted, _ = evaluate(gm, program, bound(gm, x), order)
        _, part, _ = evaluate(gm, program, bound(gm, x), order[:2])
        for output, whole, mixed, two in zip(program.outputs, found, permuted, part, strict=True):
            torch.testing.assert_close(mixed, whole[order])
            torch.testing.assert_close(two, whole[order[:2]])
            expected = env[output.node]
            tokens = [d for d, tag in enumerate(output.value.tags) if tag == "t"]
            others = [d for d in range(expected.dim()) if d not in tokens]
            torch.testing.assert_close(
                whole.reshape(-1), expected.permute(tokens + others).reshape(-1)
            )


#: what mixes rows, by the start of the reason
REFUSED = {
    "aten.sum.dim_IntList reduces over tokens": lambda z, x: z.sum(0).softmax(-1),
    "aten._softmax.default runs over tokens": lambda z, x: z.softmax(0).amax(-1),
    "aten.cumsum.default runs over tokens": lambda z, x: z.cumsum(0).amax(-1),
    "aten.flip.default moves values between tokens": lambda z, x: (z.flip(0) * z).sum(-1),
    "aten.roll.default moves values between tokens": lambda z, x: (z.roll(1, 0) * z).sum(-1),
    "a matrix product contracts tokens": lambda z, x: (z @ z.t()).amax(-1),
    "tokens are padded with constants": lambda z, x: F.pad(z / x.row[:, None], (0, 0, 1, 0)).amax(
        -1
    ),
    "a view merges token dims": lambda z, x: z.reshape(-1).cumsum(0),
    "aten.masked_select.default takes entries": lambda z, x: z.masked_select(z > 0).cumsum(0),
    "tokens are paired with other tokens": lambda z, x: (z[:, None] * z[None]).sum(-1),
    "the logits of different tokens": lambda z, x: (z[1:] * z[:-1]).sum(-1),
    "aten.native_dropout.default draws random": lambda z, x: F.dropout(z).amax(-1),
    "a write into a slice runs over tokens": lambda z, x: z.slice_scatter(z[2:4], 0, 0, 2).amax(-1),
}


@pytest.mark.parametrize("reason", list(REFUSED))
def test_refused(reason):
    gm = program_of(REFUSED[reason])
    (miss,) = analyse(gm.graph)
    assert isinstance(miss, Miss)
    assert miss.refusal.reason.startswith(reason)


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(st.permutations(range(ROWS)))
def test_permuting_tokens_permutes_results(order):
    """The same program on the tokens in another order: the results in that order."""

    def loss(hidden, weight, ids, row, vector):
        z = F.linear(hidden, weight) + vector
        p = (z * row[:, None]).log_softmax(-1)
        return p.gather(-1, ids[:, None])[:, 0] + p.sort(-1)[0][:, 3] * p.var(-1)

    gm = _permuted_graph(loss)
    (site,) = analyse(gm.graph)
    (program,) = site.programs
    x = inputs(seed=3)
    _, found, _ = evaluate(gm, program, bound(gm, x))
    order = list(order)
    y = x._replace(hidden=x.hidden[order], ids=x.ids[order], row=x.row[order])
    _, moved, _ = evaluate(gm, program, bound(gm, y))
    for whole, other in zip(found, moved, strict=True):
        torch.testing.assert_close(other, whole[order])


@pytest.mark.parametrize(("path", "found"), [("lm_head", 1), ("layers.1.experts.0.down", 0)])
def test_what_may_go_on_in_another_graph_is_no_head(path, found):
    """A graph that begins inside of an expert knows neither the expert nor its layer as modules."""
    gm = lowered(lambda hidden, weight: F.linear(hidden, weight), *inputs()[:2])
    (product,) = (node for node in gm.graph.nodes if is_product(node))
    product.meta["nn_module_stack"] = {"it": (f"L['model'].{path}", torch.nn.Linear)}
    gm.meta[IS_PART] = True
    assert len(find_heads(gm.graph)) == found


_GRAPHS = {}


def _permuted_graph(loss):
    if loss.__name__ not in _GRAPHS:
        x = inputs()
        _GRAPHS[loss.__name__] = lowered(loss, *x)
    return _GRAPHS[loss.__name__]
