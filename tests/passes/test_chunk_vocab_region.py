"""``chunk-vocab-region``: what it makes of a loss, why it declines, and that numbers agree."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.region_costs import call_cost, known_profiles, off_meta
from fxrl.ir.plan import Keep, Plan, TileHead
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls, regions_of
from fxrl.passes.chunk_vocab_region import ChunkVocabRegion
from fxrl.planner.target import TARGETS
from tests.passes.lowered import call, draw, head_inputs, lowered, plain


def margin(hidden, weight, ids):
    z = F.linear(hidden, weight)[:-1]
    return (z.gather(-1, ids[1:, None])[:, 0] - z.amax(-1)).mean()


def spread(hidden, weight, ids):
    return F.linear(hidden, weight).square().mean()


def printed(gm):
    """The graph, with region ids (hashes of their bodies) left out."""
    return re.sub(r"'[0-9a-f]{16}'", "'ID'", print_graph(gm))


def test_before():
    assert_expected_inline(
        print_graph(lowered(margin, *head_inputs())),
        """\
%hidden = input : f64[6, 4]
%weight = input : f64[32, 4]
%ids = input : i64[6]
%t = aten.t.default(%weight) : f64[4, 32]
%mm = aten.mm.default(%hidden, %t) : f64[6, 32]
%slice_1 = aten.slice.Tensor(%mm, 0, 0, -1) : f64[5, 32]
%slice_2 = aten.slice.Tensor(%ids, 0, 1, 9223372036854775807) : i64[5]
%unsqueeze = aten.unsqueeze.default(%slice_2, 1) : i64[5, 1]
%gather = aten.gather.default(%slice_1, -1, %unsqueeze) : f64[5, 1]
%select = aten.select.int(%gather, 1, 0) : f64[5]
%amax = aten.amax.default(%slice_1, [-1]) : f64[5]
%sub = aten.sub.Tensor(%select, %amax) : f64[5]
%mean = aten.mean.default(%sub) : f64[]
return %mean""",
    )


def test_applied():
    gm = lowered(margin, *head_inputs())
    report = ChunkVocabRegion(tile_tokens=2).run(gm)
    assert_expected_inline(
        printed(gm),
        """\
%hidden = input : f64[6, 4]
%weight = input : f64[32, 4]
%ids = input : i64[6]
%slice_tensor = aten.slice.Tensor(%hidden, 0, 0, -1) : f64[5, 4]
%slice_2 = aten.slice.Tensor(%ids, 0, 1, 9223372036854775807) : i64[5]
%unsqueeze = aten.unsqueeze.default(%slice_2, 1) : i64[5, 1]
%region_default = fxrl.region.default([%slice_tensor, %unsqueeze, %weight], 'ID', 2, []) : (f64[5, 1], f64[5])
%getitem_1 = operator.getitem(%region_default, 1) : f64[5]
%getitem = operator.getitem(%region_default, 0) : f64[5, 1]
%select = aten.select.int(%getitem, 1, 0) : f64[5]
%sub = aten.sub.Tensor(%select, %getitem_1) : f64[5]
%mean = aten.mean.default(%sub) : f64[]
return %mean""",
    )
    assert_expected_inline(
        plain(report),
        """applied: chunk-vocab-region @ 0:loss/mm: logits [6 x 32] live in tiles of 2 rows (saves 3 KiB)""",
    )


def test_body():
    gm = lowered(margin, *head_inputs())
    ChunkVocabRegion(tile_tokens=2).run(gm)
    (region,) = regions_of(gm).values()
    assert_expected_inline(
        print_graph(region.forward),
        """\
%rows_0 = input
%rows_1 = input
%shared_2 = input
%t_default = aten.t.default(%shared_2)
%mm_default = aten.mm.default(%rows_0, %t_default)
%gather_default = aten.gather.default(%mm_default, 1, %rows_1)
%amax_default = aten.amax.default(%mm_default, [1])
return %gather_default, %amax_default""",
    )


def test_reduction_over_tokens_and_vocabulary_keeps_the_token_part_outside():
    gm = lowered(spread, *head_inputs())
    report = ChunkVocabRegion(tile_tokens=2).run(gm)
    assert_expected_inline(
        printed(gm),
        """\
%hidden = input : f64[6, 4]
%weight = input : f64[32, 4]
%region_default = fxrl.region.default([%hidden, %weight], 'ID', 2, []) : (f64[6, 1])
%getitem = operator.getitem(%region_default, 0) : f64[6, 1]
%mean = aten.mean.default(%getitem) : f64[]
return %mean""",
    )
    assert_expected_inline(
        plain(report),
        """applied: chunk-vocab-region @ 0:loss/mm: logits [6 x 32] live in tiles of 2 rows (saves 3 KiB)""",
    )


def compares(hidden, weight, ids):
    with torch.no_grad():
        teacher = F.linear(hidden * 2, weight.flip(1)).log_softmax(-1)
    student = F.linear(hidden, weight[:, :4]).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def test_what_is_read_under_no_grad_alone_gets_no_gradient():
    """Nor a buffer of zeros, which would be as large as the teacher's head."""
    values = head_inputs()
    gm = lowered(compares, *values)
    ChunkVocabRegion(tile_tokens=2).run(gm)
    (region,) = regions_of(gm).values()
    wanted = [(spec.tiled, spec.needs_grad) for spec in region.inputs]
    assert sorted(wanted) == [(False, False), (False, True), (True, False), (True, True)]
    hidden, weight, ids = values
    found = call(gm, hidden=hidden, weight=weight, ids=ids)
    expected = compares(*values)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)]
    torch.testing.assert_close(*grads)


def escapes(hidden, weight, ids):
    z = F.linear(hidden, weight)
    return z.log_softmax(-1).gather(-1, ids[:, None]).sum(), z


def reenters(hidden, weight, ids):
    z = F.linear(hidden, weight)
    return (z + z @ torch.eye(32, dtype=z.dtype)).log_softmax(-1).gather(-1, ids[:, None]).sum()


def pairs_neighbours(hidden, weight, ids):
    p = F.linear(hidden, weight).softmax(-1)
    return (p[1:] * p[:-1]).sum(-1).mean()


def sums_over_tokens(hidden, weight, ids):
    return F.linear(hidden, weight).softmax(-1).mean(0).logsumexp(-1)


def normalises_over_tokens(hidden, weight, ids):
    return F.linear(hidden, weight).log_softmax(0).amax(-1).sum()


def draws_random_numbers(hidden, weight, ids):
    return F.dropout(F.linear(hidden, weight)).logsumexp(-1).sum()


def has_no_rule(hidden, weight, ids):
    return F.linear(hidden, weight).renorm(2, 0, 1.0).logsumexp(-1).sum()


def gives_two_elementwise(hidden, weight, ids):
    return F.linear(hidden, weight).frexp().mantissa.logsumexp(-1).sum()


def merges_tokens_with_the_vocabulary(hidden, weight, ids):
    return F.linear(hidden, weight).view(-1).log_softmax(0)[3]


def takes_a_part_of_the_vocabulary(hidden, weight, ids):
    return F.linear(hidden, weight).softmax(-1)[:, torch.arange(32) > 7].sum(-1).log().sum()


def selects_by_value(hidden, weight, ids):
    p = F.linear(hidden, weight).softmax(-1)
    return p[p > 0.1].sum()


MISSES = {
    escapes: "the logits leave the traced code: returned, stored or handed to a hook; "
    "return what is computed from them, per token",
    reenters: "the logits re-enter a layer that keeps the vocabulary dim (at %mm_1)",
    pairs_neighbours: "the logits of different tokens are combined (at %sum_1); "
    "reduce over the vocabulary first, or multiply each part's rows by the head",
    sums_over_tokens: "aten.mean.dim reduces over tokens (at %mean); "
    "reduce over the vocabulary first: what that gives per token may then be reduced",
    normalises_over_tokens: "aten._log_softmax.default runs over tokens (at %_log_softmax); "
    "take it over the vocabulary (dim=-1), or over what is computed per token",
    draws_random_numbers: "aten.native_dropout.default draws random numbers, "
    "which a recompute would repeat (at %native_dropout); "
    "compute with noise of the logits' shape: torch.rand_like(logits)",
    has_no_rule: "no row rule for aten.renorm.default (at %renorm); "
    "compute it of what the loss has per token",
    gives_two_elementwise: "no row rule for aten.frexp.Tensor (at %frexp); "
    "compute it of what the loss has per token",
    merges_tokens_with_the_vocabulary: "a view merges token dims with the vocabulary dim "
    "(at %view); pick entries with gather, or with x[rows, ids]",
    takes_a_part_of_the_vocabulary: "the vocabulary is indexed by something other than one list "
    "of ids (at %index); fill what a mask leaves out: logits.masked_fill(~mask, -inf)",
    selects_by_value: "a mask covers tokens and vocabulary together (at %index); "
    "multiply by it, and sum over the vocabulary",
}


@pytest.mark.parametrize("function", list(MISSES), ids=lambda f: f.__name__)
def test_missed(function):
    gm = lowered(function, *head_inputs())
    before = print_graph(gm)
    report = ChunkVocabRegion(tile_tokens=2).run(gm)
    assert print_graph(gm) == before
    assert not regions_of(gm)
    assert plain(report) == f"missed: chunk-vocab-region @ 0:loss/mm: {MISSES[function]}"
    assert all(re.search(r"test_chunk_vocab_region\.py:\d+$", r.source) for r in report.remarks)


def test_the_plan_keeps_it():
    gm = lowered(margin, *head_inputs())
    before = print_graph(gm)
    plan = Plan({"0:loss/mm": Keep("the plan keeps it")})
    report = ChunkVocabRegion().run(gm, plan)
    assert_expected_inline(
        plain(report), """missed: chunk-vocab-region @ 0:loss/mm: the plan keeps it"""
    )
    assert print_graph(gm) == before


def test_below_min_saved_bytes():
    gm = lowered(margin, *head_inputs())
    before = print_graph(gm)
    report = ChunkVocabRegion(min_saved_bytes=1 << 20).run(gm)
    assert_expected_inline(
        plain(report),
        """missed: chunk-vocab-region @ 0:loss/mm: it would save 4.5 KiB, below min_saved_bytes=1 MiB; pass fxrl.Config(min_saved_bytes=0) to have it anyway""",
    )
    assert print_graph(gm) == before


def test_no_head_no_remark():
    gm = lowered(lambda hidden, weight, ids: (hidden @ weight[:2].t()).sum(), *head_inputs())
    assert ChunkVocabRegion(tile_tokens=2).run(gm).remarks == ()


@pytest.mark.parametrize("tile", [1, 2, 4, 100])
@pytest.mark.parametrize("function", [margin, spread])
def test_numerics_and_gradients(function, tile):
    hidden, weight, ids = head_inputs(3)
    gm = lowered(function, hidden, weight, ids)
    plan = Plan({"0:loss/mm": TileHead("chunk-vocab-region", tile)})
    ChunkVocabRegion().run(gm, plan)
    assert regions_of(gm)
    hidden, weight, ids = head_inputs(4)
    expected = function(hidden, weight, ids)
    found = call(gm, hidden=hidden, weight=weight, ids=ids)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    want = torch.autograd.grad(expected, [hidden, weight])
    got = torch.autograd.grad(found, [hidden, weight])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_frozen_head_gets_no_gradient():
    hidden, weight, ids = head_inputs()
    weight.requires_grad_(False)
    gm = lowered(margin, hidden, weight, ids)
    ChunkVocabRegion(tile_tokens=2).run(gm)
    (region,) = regions_of(gm).values()
    assert [spec.needs_grad for spec in region.inputs] == [True, False, False]
    call(gm, hidden=hidden, weight=weight, ids=ids).backward()
    assert weight.grad is None
    assert hidden.grad is not None


# ---------------------------------------------------------------------------- gradients in forward
def divergence(hidden, weight, ids):
    with torch.no_grad():
        teacher = F.linear(hidden * 2, weight.flip(1)).log_softmax(-1)
    student = F.linear(hidden, weight).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def divergence_and_margin(hidden, weight, ids):
    top = F.linear(hidden, weight).amax(-1).tanh()
    return divergence(hidden, weight, ids) * top


def divergence_beside_a_metric(hidden, weight, ids):
    logps = F.linear(hidden, weight).log_softmax(-1)
    loss, metric = logps.square().sum(-1), logps.detach().exp().amax(-1)
    return loss * metric + logps.topk(3).values.detach().sum(-1)


def temperature_of_each_row(hidden, weight, ids):
    scale = hidden.exp().sum(-1, keepdim=True)
    return (F.linear(hidden, weight) / scale).softmax(-1).square().sum(-1)


def of_a_chosen_row(hidden, weight, ids):
    return F.linear(hidden, weight)[1:-1].log_softmax(-1).amin(-1)


def row_margin(hidden, weight, ids):
    z = F.linear(hidden, weight)
    return z.gather(-1, ids[:, None])[:, 0] - z.amax(-1)


def clips_its_gradient(hidden, weight, ids):
    return Clipped.apply(F.linear(hidden, weight)).square().sum(-1)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


def several_numbers_of_a_row(hidden, weight, ids):
    return F.linear(hidden, weight).log_softmax(-1).topk(3).values.sum(-1).tanh()


def frozen(function, seed=0, **options):
    """The rewritten graph of a loss over a frozen head, its inputs, and what was said."""
    hidden, weight, ids = head_inputs(seed)
    weight.requires_grad_(False)
    gm = lowered(function, hidden, weight, ids)
    report = ChunkVocabRegion(tile_tokens=2, **options).run(gm)
    return gm, {"hidden": hidden, "weight": weight, "ids": ids}, report


def cuts(gm):
    return [region.cut for region in regions_of(gm).values()]


def products(function, *args, **options):
    """What a function returns, and how many matrix products it runs."""
    with torch.autograd.profiler.profile() as profiler:
        result = function(*args, **options)
    return result, sum(e.count for e in profiler.key_averages() if e.key == "aten::mm")


MADE = {  # the products of a tile's forward; in the backward there are none
    divergence: 3,
    divergence_beside_a_metric: 2,
    temperature_of_each_row: 2,
    of_a_chosen_row: 2,
}


@pytest.mark.parametrize("function", list(MADE), ids=lambda f: f.__name__)
def test_of_a_frozen_head_the_forward_makes_the_gradients(function):
    gm, inputs, report = frozen(function)
    assert cuts(gm) == ["vectors"]
    assert "live in tiles of 2 rows, which make the gradients too" in plain(report)
    expected = function(*inputs.values())
    found = call(gm, **inputs)  # which holds the kernels, so that nothing is traced again
    _, ahead = products(call, gm, **inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    tiles = len(expected) // 2
    assert ahead == MADE[function] * tiles
    for seed in (1, 2):  # the same vectors twice
        upstream = draw(len(expected), seed=seed)
        given = inputs["hidden"], upstream
        want = torch.autograd.grad(expected, *given, retain_graph=True)
        got, back = products(torch.autograd.grad, found, *given, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert back == 0


def test_two_outputs_have_a_vector_each():
    gm, inputs, report = frozen(divergence_and_margin)
    assert cuts(gm) == ["vectors"]
    *_, without = frozen(divergence_and_margin, save_vectors=False)
    vectors = 2 * inputs["hidden"].nbytes
    assert without.saved_bytes - report.saved_bytes == vectors
    expected = divergence_and_margin(*inputs.values())
    found, twice = call(gm, **inputs), call(gm, **inputs)
    upstream = draw(6)
    (want,) = torch.autograd.grad(expected, inputs["hidden"], upstream)
    (got,) = torch.autograd.grad(found - 2 * twice, inputs["hidden"], upstream)
    torch.testing.assert_close(got, -want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (row_margin, {}),  # two vectors would cost what one tile more does, and memory
        (clips_its_gradient, {}),
        (several_numbers_of_a_row, {}),
        (divergence, {"save_vectors": False}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_where_that_is_wrong_or_spares_nothing_the_tile_is_computed_again(function, options):
    gm, inputs, _ = frozen(function, **options)
    assert cuts(gm) == ["inputs"]
    expected, found = function(*inputs.values()), call(gm, **inputs)
    upstream = draw(*expected.shape)
    grads = [torch.autograd.grad(x, inputs["hidden"], upstream) for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", ["weight", "nothing", "float16"])
def test_who_makes_no_vectors(trained):
    """A trained head needs the logits' gradient; nothing trained, no gradient at all; and in
    float16 a small one would be lost before the loss is scaled."""
    hidden, weight, ids = head_inputs()
    hidden.requires_grad_(trained == "float16")
    weight.requires_grad_(trained == "weight")
    if trained == "float16":
        hidden, weight = hidden.detach().half().requires_grad_(), weight.half()
    gm = lowered(divergence, hidden, weight, ids)
    ChunkVocabRegion(tile_tokens=2).run(gm)
    assert cuts(gm) == ["inputs"]


def test_what_is_scored_has_the_bits_of_what_is_trained():
    """Compiled: a tile that makes gradients too rounds as one that makes none."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 64, generator=generator).bfloat16().requires_grad_(n == 48)
        for n in (48, 2000)
    )
    ids = torch.randint(0, 2000, (48,), generator=generator)
    found = []
    for trained in (True, False):
        gm = lowered(divergence, hidden.detach().requires_grad_(trained), weight, ids)
        ChunkVocabRegion(tile_tokens=16).run(gm)
        assert cuts(gm) == ["vectors" if trained else "inputs"]
        given = {"hidden": hidden, "weight": weight, "ids": ids}
        found.append(call(gm, InductorOptions.of(None), **given))
    assert torch.equal(*found)
    upstream, eager = draw(48), divergence(hidden, weight, ids)
    exact = hidden.detach().double().requires_grad_()
    truth = divergence(exact, weight.double(), ids)
    grads = [
        torch.autograd.grad(result, x, upstream.to(result.dtype))[0].double()
        for result, x in ((found[0], hidden), (eager, hidden), (truth, exact))
    ]
    error, of_eager = (torch.dist(grad, grads[2]) for grad in grads[:2])
    assert error < 1.1 * of_eager


@pytest.mark.parametrize(("save", "ahead", "behind"), [(True, 3, 0), (False, 2, 3)])
def test_the_planner_knows_what_is_kept_and_multiplied(save, ahead, behind):
    rows, width, vocab = 8192, 4096, 32768
    hidden, weight = (
        torch.empty(n, width, device="meta", dtype=torch.bfloat16, requires_grad=n == rows)
        for n in (rows, vocab)
    )
    gm = lowered(divergence, hidden, weight, torch.empty(rows, device="meta", dtype=torch.long))
    ChunkVocabRegion(tile_tokens=2048, save_vectors=save).run(gm)
    (made,) = region_calls(gm)
    target, profiles = TARGETS["h100"], known_profiles(None, Plan())
    inputs = [node.meta["val"] for node in made.args[0]]
    figures = profiles(off_meta(made.meta["region"])).at(inputs, int, target, 2048)
    cost, states = call_cost(made, figures, int), 2 * rows * width
    assert cost.kept_bytes == save * states
    assert len(cost.reads_later) == 4 * (not save)
    product = 2 * rows * width * vocab / target.product_flops
    for seconds, count in ((figures.forward_s, ahead), (figures.backward_s, behind)):
        assert count <= seconds / product < 1.15 * count + 0.02
