"""``factor-masks``: masks become expressions over vectors, numbers agree, every miss has its reason."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.utils.checkpoint import checkpoint

from fxrl.compile.bodies.variants import build_region
from fxrl.config import Config
from fxrl.ir.bodies import modules_of
from fxrl.ir.graph import is_attention, is_call
from fxrl.ir.plan import Keep, Plan
from fxrl.ir.printer import print_graph
from fxrl.ir.region import regions_of
from fxrl.passes.factor_masks import FactorMasks
from fxrl.passes.outline_layers import OutlineLayers
from fxrl.planner.cost import attention_flops
from fxrl.step import optimize
from tests.passes.layered import Block, ids_batch, make_stack
from tests.passes.lowered import call, lowered

T = 6


def inputs():
    draw = torch.Generator().manual_seed(0)

    def one():
        x = torch.randn(2, T, 4, 3, generator=draw, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    keep = torch.ones(2, T, dtype=torch.long)
    keep[0, :3] = 0
    docs = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 3, 3]])
    return {"q": one(), "key": one(), "value": one(), "real": keep, "docs": docs}


def attend(mask, q, key, value, **options):
    return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, **options)


def index():
    return torch.arange(T)


def causal():
    return index()[None, :] <= index()[:, None]


# ------------------------------------------------------------------------- masks, as people write
def left_padding(q, key, value, real, docs):
    return attend(causal() & real.bool()[:, None, None, :], q, key, value)


def right_padding_of_queries_too(q, key, value, real, docs):
    kept = real.flip(1).bool()
    square = kept[:, :, None] & kept[:, None, :]
    return attend((square & causal())[:, None].expand(-1, 4, -1, -1), q, key, value)


def documents(q, key, value, real, docs):
    return attend((docs[:, None, :, None] == docs[:, None, None, :]) & causal(), q, key, value)


def window(q, key, value, real, docs):
    near = index()[:, None] - index()[None, :] < 3
    return attend((near & causal())[None, None], q, key, value)


def chunks(q, key, value, real, docs):
    chunk = index() // 2
    return attend(torch.logical_and(chunk[None, :] == chunk[:, None], causal()), q, key, value)


def prefix(q, key, value, real, docs):
    seen = causal() | (index()[None, :] < real.sum(-1)[:, None, None])
    return attend(seen.unsqueeze(1), q, key, value, scale=0.3)


def lower_triangle(q, key, value, real, docs):
    return attend(
        torch.ones(T, T, dtype=torch.bool).tril() & real.bool()[:, None, None], q, key, value
    )


def triangle_of_numbers(q, key, value, real, docs):
    hidden = 1 - torch.tril(torch.ones(T, T))
    return attend((hidden == 0) & real.bool()[:, None, None], q, key, value)


def keys_first(q, key, value, real, docs):
    """A transposed square, and what is hidden instead of what is seen."""
    hidden = (index()[:, None] > index()[None, :]) | (docs[:, :, None] != docs[:, None, :])
    return attend(~hidden.transpose(1, 2)[:, None], q, key, value)


def mapped(q, key, value, real, docs):
    """One pair at a time, by ``vmap``."""

    def seen(b, at, other):
        return (other <= at) & (docs[b, at] == docs[b, other]) & (real[b, other] > 0)

    each = torch.vmap(seen, (None, None, 0))
    each = torch.vmap(torch.vmap(each, (None, 0, None)), (0, None, None))
    return attend(each(torch.arange(2), index(), index())[:, None], q, key, value)


def grouped(q, key, value, real, docs):
    return attend(causal() & (docs[:, None, :, None] == docs[:, None, None, :]), q, key[:, :2], value[:, :2], enable_gqa=True)  # fmt: skip


def repeated_keys(q, key, value, real, docs):
    wide = (x[:, :2, None].expand(2, 2, 2, T, 3).reshape(2, 4, T, 3) for x in (key, value))
    return attend(causal() & real.bool()[:, None, None], q, *wide)


def checkpointed(q, key, value, real, docs):
    mask = causal() & real.bool()[:, None, None]
    x = checkpoint(attend, mask, q, key, value, use_reentrant=False)
    return checkpoint(attend, mask, x, key, value, use_reentrant=False)


#: Each with the expression that it is.
MASKS = {
    left_padding: "bitwise_and(le(key, query), v0)",
    right_padding_of_queries_too: "bitwise_and(bitwise_and(v0, v1), le(key, query))",
    documents: "bitwise_and(eq(v0, v1), le(key, query))",
    window: "bitwise_and(lt(sub(query, key), 3), le(key, query))",
    chunks: "bitwise_and(eq(v0, v1), le(key, query))",
    prefix: "bitwise_or(le(key, query), v0)",
    lower_triangle: "bitwise_and(le(key, query), v0)",
    triangle_of_numbers: "bitwise_and(eq(rsub(where(le(key, query), 1.0, 0), 1), 0), v0)",
    keys_first: "bitwise_not(bitwise_or(gt(key, query), ne(v0, v1)))",
    mapped: "bitwise_and(bitwise_and(le(key, v0), eq(v1, v2)), v3)",
    grouped: "bitwise_and(le(key, query), eq(v0, v1))",
    repeated_keys: "bitwise_and(le(key, query), v0)",
    checkpointed: "bitwise_and(le(key, query), v0)",
}


@pytest.mark.parametrize("attention", MASKS, ids=lambda attention: attention.__name__)
def test_a_mask_becomes_an_expression_with_equal_numbers(attention):
    given = inputs()
    gm = lowered(attention, *given.values(), respelled=False)
    (remark,) = FactorMasks().run(gm).remarks
    assert remark.kind == "applied"
    assert "scaled_dot_product" not in print_graph(gm)
    text, *origins = re.split(r", v\d from ", remark.reason.partition(": ")[2])
    assert text == MASKS[attention]
    assert len(origins) <= len(set(re.findall(r"v\d", text)))  # the others are of sizes alone
    assert set(origins) <= set(given)  # by their names in the user's code
    heads = [given[name] for name in ("q", "key", "value")]
    result, expected = call(gm, **given), attention(**given)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    found, truth = (torch.autograd.grad((x * weights).sum(), heads) for x in (result, expected))
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def test_the_rewritten_graph_has_no_mask():
    gm = lowered(documents, *inputs().values(), respelled=False)
    FactorMasks().run(gm)
    assert_expected_inline(
        print_graph(gm),
        """\
%docs = input : i64[2, 6]
%q = input : f64[2, 4, 6, 3]
%key = input : f64[2, 4, 6, 3]
%value = input : f64[2, 4, 6, 3]
%unsqueeze = aten.unsqueeze.default(%docs, 1) : i64[2, 1, 6]
%unsqueeze_1 = aten.unsqueeze.default(%unsqueeze, 3) : i64[2, 1, 6, 1]
%unsqueeze_2 = aten.unsqueeze.default(%docs, 1) : i64[2, 1, 6]
%unsqueeze_3 = aten.unsqueeze.default(%unsqueeze_2, 2) : i64[2, 1, 1, 6]
%mask_blocks_default = fxrl.mask_blocks.default([%unsqueeze_1, %unsqueeze_3], 'bitwise_and(eq(v0, v1), le(key, query))', 6, 6, cpu) : (i32[2, 1, 1], i32[2, 1, 1, 1], i32[2, 1, 1], i32[2, 1, 1, 1], i32[2, 1, 1], i32[2, 1, 1, 1], i32[2, 1, 1], i32[2, 1, 1, 1])
%getitem = operator.getitem(%mask_blocks_default, 0) : i32[2, 1, 1]
%getitem_1 = operator.getitem(%mask_blocks_default, 1) : i32[2, 1, 1, 1]
%getitem_2 = operator.getitem(%mask_blocks_default, 2) : i32[2, 1, 1]
%getitem_3 = operator.getitem(%mask_blocks_default, 3) : i32[2, 1, 1, 1]
%getitem_4 = operator.getitem(%mask_blocks_default, 4) : i32[2, 1, 1]
%getitem_5 = operator.getitem(%mask_blocks_default, 5) : i32[2, 1, 1, 1]
%getitem_6 = operator.getitem(%mask_blocks_default, 6) : i32[2, 1, 1]
%getitem_7 = operator.getitem(%mask_blocks_default, 7) : i32[2, 1, 1, 1]
%masked_attention_default = fxrl.masked_attention.default(%q, %key, %value, [%unsqueeze_1, %unsqueeze_3], [%getitem, %getitem_1, %getitem_2, %getitem_3, %getitem_4, %getitem_5, %getitem_6, %getitem_7], 'bitwise_and(eq(v0, v1), le(key, query))', 0.5773502691896257) : (f64[2, 4, 6, 3], f64[2, 4, 6])
%getitem_8 = operator.getitem(%masked_attention_default, 0) : f64[2, 4, 6, 3]
return %getitem_8""",
    )


def test_masks_alike_are_made_once_for_all_layers():
    gm = lowered(checkpointed, *inputs().values(), respelled=False)
    FactorMasks().run(gm)
    calls = [n for m in modules_of(gm) for n in m.graph.nodes]
    assert sum(is_call(n, torch.ops.fxrl.mask_blocks.default) for n in calls) == 1
    assert sum(is_call(n, torch.ops.fxrl.masked_attention.default) for n in calls) == 2


class Masked(Block):
    """A layer under the mask that the model made."""

    def forward(self, x, mask):
        def heads(name):
            return self.qkv[name](x).view(*x.shape[:2], 2, 4).transpose(1, 2)

        mixed = attend(mask, *map(heads, "qkv")).transpose(1, 2).reshape(x.shape)
        return x + self.mlp(x + self.out(mixed))


def document_loss(model, batch):
    """Equal ids are a document."""
    ids, at = batch["ids"], torch.arange(batch["ids"].shape[1])
    same = ids[:, None, :, None] == ids[:, None, None, :]
    x, mask = model.embed(ids), same & (at <= at[:, None])
    for block in model.blocks:
        x = block(x, mask)
    return model.head(x).square().mean()


def test_one_graph_serves_all_lengths():
    """Those of one block, and those of several."""
    model = make_stack(2, block=Masked)
    passes = ("factor-masks", "outline-layers", "recompute")
    step = optimize(model, document_loss, Config(passes=passes, compile_regions=False))
    for rows, length in ((2, 5), (3, 130)):
        batch, found = ids_batch(rows, length), []
        for loss in (document_loss(model, batch), step(batch)):
            found.append(
                torch.autograd.grad(loss, list(model.blocks.parameters()), allow_unused=True)
            )
        torch.testing.assert_close([g for g in found[1] if g is not None], [g for g in found[0] if g is not None], rtol=1e-10, atol=1e-12)  # fmt: skip
    assert len(step.captures) == 1


@pytest.fixture(scope="module")
def layer():
    """The region of a layer under a mask of documents."""
    model = make_stack(2, block=Masked)
    gm = lowered(lambda batch: document_loss(model, batch), ids_batch())
    FactorMasks().run(gm)
    OutlineLayers().run(gm)
    (region,) = regions_of(gm).values()
    return region


@pytest.mark.parametrize("cut", ["inputs", "attention", "fewest", "products"])
def test_attention_runs_again_only_where_nothing_is_kept(layer, cut):
    built = build_region(replace(layer, cut=cut), None)
    forward, backward = ([n.target for n in half.graph.nodes] for half in built.traced.graphs[:2])
    again = backward.count(torch.ops.fxrl.masked_attention.default)
    assert (forward.count(torch.ops.fxrl.masked_attention.default), again) == (1, cut == "inputs")
    assert backward.count(torch.ops.fxrl.masked_attention_vjp.default) == 1
    assert built.attention == "attention under a computed mask"


def test_the_planner_counts_it_as_causal_attention(layer):
    """Two heads of 4 over 2 rows of 5 tokens: 4 * 2 * 2 * 5 * 5 * 4 FLOPs, half of them hidden."""
    nodes = build_region(layer, None).traced.forward.graph.nodes
    (call,) = [n for n in nodes if is_call(n, torch.ops.fxrl.masked_attention.default)]
    assert is_attention(call)
    assert attention_flops(call, int, {}) == 4 * 2 * 2 * 5 * 5 * 4 // 2


# ------------------------------------------------------------------------- misses
def of_scores(q, key, value, real, docs):
    return attend((q @ key.transpose(-1, -2)).detach() > 0, q, key, value)


def numbers(q, key, value, real, docs):
    return attend(torch.where(causal(), 0.0, -1e9).double(), q, key, value)


def summed(q, key, value, real, docs):
    return attend(causal().long().cumsum(-1) > 1, q, key, value)


def cut_out(q, key, value, real, docs):
    wide = torch.arange(T + 1)
    return attend((wide[None, :] <= wide[:, None])[1:, :-1], q, key, value)


def hides_nothing(q, key, value, real, docs):
    return attend(q.new_ones((T, T), dtype=torch.bool) & q.new_ones((T, T), dtype=torch.bool), q, key, value)  # fmt: skip


def endless(q, key, value, real, docs):
    seen = causal()
    for step in range(8):
        seen = (seen ^ (docs[:, :, None] == step)) | (seen & causal())
    return attend(seen[:, None], q, key, value)


def with_dropout(q, key, value, real, docs):
    return attend(causal() & real.bool()[:, None, None], q, key, value, dropout_p=0.5)


def without_heads(q, key, value, real, docs):
    return attend(causal() & real.bool()[:, None], q[:, 0], key[:, 0], value[:, 0])


MISSES = (of_scores, numbers, summed, cut_out, hides_nothing, endless, with_dropout, without_heads)


def test_every_miss_has_its_reason():
    told = []
    for attention in MISSES:
        gm = lowered(attention, *inputs().values(), respelled=False)
        before = print_graph(gm)
        (remark,) = FactorMasks().run(gm).remarks
        assert remark.kind == "missed"
        assert print_graph(gm) == before
        told.append(f"{attention.__name__}: {remark.reason}")
    assert_expected_inline(
        "\n".join(told),
        """\
of_scores: 1 attention calls keep their mask: %view (aten.view.default) is not made pair by pair (at %view)
numbers: 1 attention calls keep their mask: it adds numbers to the scores (at %_to_copy)
summed: 1 attention calls keep their mask: %cumsum (aten.cumsum.default) is not made pair by pair (at %cumsum)
cut_out: 1 attention calls keep their mask: %slice_2 (aten.slice.Tensor) is not made pair by pair (at %slice_2)
hides_nothing: 1 attention calls keep their mask: it hides nothing
endless: 1 attention calls keep their mask: the expression of %bitwise_or_4 is longer than 2000 (at %bitwise_or_4)
with_dropout: 1 attention calls keep their mask: attention has dropout
without_heads: 1 attention calls keep their mask: attention is not over [batch, heads, tokens, features]""",
    )


def test_missed_when_the_mask_is_given_dense():
    def given(q, square):
        return attend(square & causal(), q, q, q)

    gm = lowered(given, inputs()["q"], causal()[None, None], respelled=False)
    (remark,) = FactorMasks().run(gm).remarks
    assert_expected_inline(
        f"{remark.reason}; {remark.cure}",
        """1 attention calls keep their mask: %l_square_ has an entry for each pair already (at %l_square_); give the model attention_mask as [B, T], or position_ids""",
    )


def test_missed_where_layers_that_are_one_graph_have_masks_of_their_own():
    model, at = make_stack(2, block=Masked), torch.arange(5)

    def loss(model, batch):
        x = model.embed(batch["ids"])
        for width, block in enumerate(model.blocks, 2):
            x = block(x, (at <= at[:, None]) & (at > at[:, None] - width))
        return x.square().mean()

    config = Config(passes=("factor-masks",), compile_regions=False, on_miss="ignore")
    step = optimize(model, loss, config)
    step(ids_batch()).backward()
    (remark,) = [r for r in step.report.remarks if r.pass_name == "factor-masks"]
    assert remark.kind == "missed"
    assert_expected_inline(
        remark.reason,
        """2 attention calls keep their mask: layers that are one graph are given different masks (at %given_value)""",
    )


def test_a_mask_of_one_entry_for_each_key_is_no_site():
    def narrow(q, key, value, real, docs):
        return attend(real.bool()[:, None, None, :], q, key, value)

    gm = lowered(narrow, *inputs().values(), respelled=False)
    assert not FactorMasks().run(gm).remarks


def test_a_small_mask_stays_unless_the_pass_is_asked_for():
    gm = lowered(left_padding, *inputs().values(), respelled=False)
    (remark,) = FactorMasks.of(Config()).run(gm).remarks
    assert remark.kind == "analysis"
    assert_expected_inline(
        remark.reason, """the mask has 72 B, below 1.00 GiB, from where it pays on this device"""
    )
    assert FactorMasks.of(Config(passes=("factor-masks",))) == FactorMasks()
    gm = lowered(with_dropout, *inputs().values(), respelled=False)
    (remark,) = FactorMasks.of(Config()).run(gm).remarks
    assert remark.kind == "analysis"  # nothing is lost by a small one


def test_missed_when_the_plan_keeps_it():
    gm = lowered(left_padding, *inputs().values(), respelled=False)
    (site,) = FactorMasks().match(gm)
    plan = Plan({site.name: Keep("a dense mask is wanted", missed=False)})
    (remark,) = FactorMasks().run(gm, plan).remarks
    assert (remark.kind, remark.reason) == ("analysis", "a dense mask is wanted")
