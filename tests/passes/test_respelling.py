"""The passes that respell a graph: what they make, what they leave and why, and equal numbers."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.utils.checkpoint import checkpoint

from fxrl.ir.graph import inputs_of
from fxrl.ir.printer import print_graph
from fxrl.passes import REGISTRY
from fxrl.passes.differentiate_copies import DifferentiateCopies
from fxrl.passes.drop_unused_inputs import DropUnusedInputs
from fxrl.passes.eliminate_noops import EliminateNoops
from fxrl.passes.fold_broadcast_products import FoldBroadcastProducts
from fxrl.passes.group_queries import GroupQueries
from fxrl.passes.open_loss_checkpoints import OpenLossCheckpoints
from fxrl.passes.rebatch_loops import RebatchLoops
from fxrl.passes.restore_causal_attention import RestoreCausalAttention
from fxrl.passes.select_detached_rows import SelectDetachedRows
from fxrl.passes.tensorize_floats import TensorizeFloats
from tests.passes.lowered import lowered, runnable


def draw(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=torch.float64, requires_grad=True)


def rewritten(one, function, *args):
    """The graph after one pass, its remarks; numbers and gradients equal eager's."""
    gm = lowered(function, *args, respelled=False)
    report = one.run(gm)
    assert {remark.kind for remark in report.remarks} <= {"analysis"}, "a fact, no win and no loss"
    assert_equals_eager(gm, function, args)
    return gm, report


def assert_equals_eager(gm, function, args):
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    names = [n.name for n in inputs_of(gm.graph) if "val" in n.meta]
    assert len(names) >= len(inputs)
    given = dict(zip(function.__code__.co_varnames, args, strict=False))
    values = [next(v for k, v in given.items() if f"_{k}_" in f"_{n.lower()}_") for n in names]
    found, wanted = runnable(gm)(*values), function(*args)
    found = found[0] if isinstance(found, (tuple, list)) else found
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [x for x in inputs if x.requires_grad]
    if leaves:
        pairs = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted)]
        torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-11, atol=1e-11)


def body(gm):
    """The graph without its inputs."""
    return "\n".join(line for line in print_graph(gm).splitlines() if "= input" not in line)


def reasons(report):
    return "\n".join(re.sub(r"_\d+\b", "", remark.reason) for remark in report.remarks)


# ---------------------------------------------------------------------------- tensorize-floats
def test_a_float_of_the_batch_stays_a_tensor():
    def scaled(x, t):
        return x / t.item()

    gm, report = rewritten(TensorizeFloats(), scaled, draw(2, 3), torch.tensor(0.7).double())
    assert "_local_scalar_dense" not in print_graph(gm)
    assert_expected_inline(reasons(report), """1 numbers stay tensors""")


def test_arithmetic_of_floats_follows():
    def scaled(x, t, s):
        return x * (2 - t.item() * s.item())

    args = draw(2, 3), torch.tensor(0.7).double(), torch.tensor(0.2).double()
    gm, report = rewritten(TensorizeFloats(), scaled, *args)
    assert "_local_scalar_dense" not in print_graph(gm)
    assert_expected_inline(reasons(report), """2 numbers stay tensors""")


@pytest.mark.parametrize("op", ["gt", "ge", "lt", "le", "eq", "ne"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_threshold_stays_a_tensor(op, dtype):
    def kept(x, t):
        return torch.where(getattr(x, op)(t.item()), x, 0.0)

    x = draw(4, 3).detach().to(dtype)
    t = x[1, 1].double() if op in ("eq", "ne") else torch.tensor(0.1).double()
    gm, _ = rewritten(TensorizeFloats(), kept, x, t)
    narrow = dtype == torch.bfloat16  # which a GPU compares in float32
    assert ("_local_scalar_dense" in print_graph(gm)) == narrow


def test_a_number_for_an_op_that_takes_numbers_stays():
    def clamped(x, t):
        return x.clamp(max=t.item())

    gm, _ = rewritten(TensorizeFloats(), clamped, draw(2, 3), torch.tensor(0.7).double())
    assert "_local_scalar_dense" in print_graph(gm)


def test_no_floats_no_remark():
    assert not rewritten(TensorizeFloats(), lambda x: x * 2, draw(2, 3))[1].remarks


# ---------------------------------------------------------------------------- rebatch-loops
def test_a_loop_over_sequences_runs_on_all():
    def loop(x):
        return torch.stack([torch.logsumexp(row.exp(), -1) for row in x])

    gm, report = rewritten(RebatchLoops(), loop, draw(3, 4, 5))
    assert_expected_inline(
        body(gm),
        """\
%exp_default = aten.exp.default(%x) : f64[3, 4, 5]
%logsumexp_default = aten.logsumexp.default(%exp_default, [-1]) : f64[3, 4]
return %logsumexp_default""",
    )
    assert_expected_inline(reasons(report), """a loop over 3 sequences runs on all at once""")


def test_a_loop_after_a_write_into_a_view_is_a_loop():
    def loop(x):
        rows = (x * 1).view(1, 6, 5).squeeze(0)
        rows.div_(0.7)
        return torch.stack([torch.logsumexp(row, -1) for row in rows])

    _, report = rewritten(RebatchLoops(), loop, draw(2, 3, 5))
    assert_expected_inline(reasons(report), """a loop over 6 sequences runs on all at once""")


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (lambda x: torch.stack([x[0].exp(), x[1].sin()]), "not computed by the same ops"),
        (lambda x: torch.stack([x[0].sum(-1), x[1].sum(0)[:4]]), "not computed by the same ops"),
        (lambda x: torch.stack([x[0] * 2, x[1] * 3]), "different arguments"),
        (lambda x: torch.stack([x[0].flip(0), x[1].flip(0)]), "not known to act within"),
        (lambda x: torch.stack([x[0].sum(0) * x[0], x[1].sum(0) * x[1]]), "broadcast against"),
    ],
)
def test_other_stacks_stay_and_say_why(loop, reason):
    def stacked(x):
        return loop(x)

    gm = lowered(stacked, draw(2, 4, 5), respelled=False)
    before = body(gm)
    report = RebatchLoops().run(gm)
    gm.graph.eliminate_dead_code()
    assert reason in reasons(report)
    assert body(gm) == before


def buffered(x, ids):
    """Chunks of rows into a buffer; a chunk's last one is shorter."""
    out = x.new_empty(8)
    for s in range(0, 8, 3):
        rows = x[s : s + 3].sort(-1).values.cumsum(-1)
        out[s : s + 3] = rows.gather(-1, ids[s : s + 3, None])[:, 0] - rows.logsumexp(-1)
    return out


def joined(x, ids):
    parts = zip(x.split(3), ids.split(3), strict=True)
    return torch.cat([(p * 2).softmax(-1).gather(1, i.unsqueeze(-1)).sum(1) for p, i in parts])


def zeros(x):
    return (x > 9).long()


def columns(x, ids):
    parts = zip(x.split([2, 3], 1), ids.split([2, 3], 1), strict=True)
    return torch.cat([p.exp() * i for p, i in parts], 1).sum(1)


@pytest.mark.parametrize(("loop", "chunks"), [(buffered, 3), (joined, 3), (columns, 2)])
def test_a_loop_over_chunks_runs_on_all(loop, chunks):
    ids = torch.arange(40).view(8, 5) % 5 if loop is columns else torch.arange(8) % 5
    args = (draw(8, 5), ids)
    gm = lowered(loop, *args, respelled=False)
    DifferentiateCopies().run(gm)
    report = RebatchLoops().run(gm)
    assert reasons(report) == f"a loop over {chunks} chunks runs on all at once"
    assert_equals_eager(gm, loop, args)
    gm.graph.eliminate_dead_code()
    assert not {"slice_scatter.default", "cat.default", "split.Tensor"} & {
        str(n.target).removeprefix("aten.") for n in gm.graph.nodes
    }


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (lambda x: torch.cat([x[:3].softmax(0), x[3:].softmax(0)]), "runs along the chunks"),
        (lambda x: torch.cat([x[:3] - x[:3].mean(), x[3:] - x[3:].mean()]), "broadcast against"),
        (lambda x: torch.cat([x[:3] * x[0], x[3:] * x[1]]), "broadcast against"),
        (lambda x: torch.cat([x[:4] * x[:1], x[4:] * x[1:2]]), "fewer rows"),
        (
            lambda x: torch.cat([x[:4].gather(0, zeros(x[:2])), x[4:].gather(0, zeros(x[2:4]))]),
            "fewer rows",
        ),
        (
            lambda x: torch.cat([x[:4].gather(1, zeros(x[:2])), x[4:].gather(1, zeros(x[2:4]))]),
            "fewer rows",
        ),
        (lambda x: torch.cat([x[:3].exp(), x[2:].exp()]), "one after another"),
        (lambda x: torch.cat([x[:3].exp(), x[3:5].exp()]), "one after another"),
        (lambda x: torch.cat([x[:4] * x[:4, :1], x[4:] * x[:4, :1]]), "one after another"),
    ],
)
def test_other_chunks_stay_and_say_why(loop, reason):
    _, report = rewritten(RebatchLoops(), lambda x: loop(x), draw(8, 5))
    assert reason in reasons(report)


def test_a_stack_of_other_things_is_no_loop():
    assert not rewritten(RebatchLoops(), lambda x: torch.stack([x.sum(), x.mean()]), draw(3))[
        1
    ].remarks


# ---------------------------------------------------------------------------- fold-broadcast
def test_one_weight_for_the_batch_is_one_product():
    def sliced(x, w):
        return torch.einsum("bth,vh->btv", x[:, :-1], w)

    args = draw(2, 4, 3), draw(5, 3)
    assert "aten.bmm" in print_graph(lowered(sliced, *args, respelled=False))
    gm, report = rewritten(FoldBroadcastProducts(), sliced, *args)
    assert "aten.bmm" not in print_graph(gm)
    assert "aten.mm" in print_graph(gm)
    assert_expected_inline(
        reasons(report), """a batched product with one weight is a product of all rows"""
    )


def wide(x, w, b):
    return F.conv1d(x, w, b).log_softmax(1)


def viewed(x, w, b):
    return F.conv1d(x[..., 1:], w, b).view(2, 15).view(2, 5, 3).logsumexp(1)


def biased(x, w, b):
    return torch.baddbmm(b[None, None], x, w[..., 0].t().expand(2, -1, -1)).log_softmax(-1)


@pytest.mark.parametrize(
    ("head", "sizes", "said"),
    [
        (wide, (2, 3, 4), "a convolution one token wide is a product of all rows"),
        (viewed, (2, 3, 4), "a convolution one token wide is a product of all rows"),
        (biased, (2, 4, 3), "a batched product with one weight is a product of all rows"),
    ],
)
def test_heads_in_other_spellings_are_products_of_all_rows(head, sizes, said):
    gm, report = rewritten(FoldBroadcastProducts(), head, draw(*sizes), draw(5, 3, 1), draw(5))
    assert "aten.mm" in print_graph(gm)
    assert reasons(report) == said


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv1d(x, w).tanh(),
        lambda x, w: F.conv1d(x, w, stride=2).log_softmax(1),
        lambda x, w: F.conv1d(x, w[:2]).log_softmax(1),
    ],
    ids=["no classes", "strided", "narrow"],
)
def test_convolutions_that_are_no_heads_stay(function):
    gm, report = rewritten(FoldBroadcastProducts(), function, draw(2, 3, 4), draw(5, 3, 1))
    assert "aten.convolution" in print_graph(gm)
    assert not report.remarks


@pytest.mark.parametrize(
    ("heads", "stays"),
    [
        (lambda x, w: torch.bmm(x, w).log_softmax(-1), False),
        (lambda x, w, b: torch.baddbmm(b, x, w).log_softmax(-1), False),
        (lambda x, w, b: torch.baddbmm(b, x, w, beta=0.5, alpha=2).log_softmax(-1), True),
        (lambda x, w: torch.bmm(x, w).tanh(), True),
        (lambda x, w: torch.bmm(x, w[..., :3]).log_softmax(-1), True),
    ],
    ids=["plain", "biased", "scaled", "no classes", "narrow"],
)
def test_a_head_for_each_codebook_is_a_product_of_its_own(heads, stays):
    args = [draw(2, 4, 3), draw(2, 3, 5), draw(2, 1, 5)][: heads.__code__.co_argcount]
    gm = lowered(heads, *args, respelled=False)
    for node in inputs_of(gm.graph):
        node.meta["of_model"] = True
    report = FoldBroadcastProducts().run(gm)
    assert_equals_eager(gm, heads, args)
    assert len(re.findall(r"aten\.mm\b", print_graph(gm))) == (0 if stays else 2)
    told = "a batched product with several heads is one with each"
    assert reasons(report) == ("" if stays else told)


def test_a_matrix_for_each_sequence_stays():
    gm, report = rewritten(
        FoldBroadcastProducts(), lambda x, w: torch.bmm(x, w), draw(2, 4, 3), draw(2, 3, 5)
    )
    assert "aten.bmm" in print_graph(gm)
    assert not report.remarks


# ---------------------------------------------------------------------------- open-loss-checkpoints
def picked(x, w, ids):
    return torch.log_softmax(x @ w, -1).gather(-1, ids[:, None])


def test_a_checkpointed_head_is_opened():
    def loss(x, w, ids):
        return checkpoint(picked, x, w, ids, use_reentrant=False)

    ids = torch.tensor([1, 0, 4, 2])
    args = draw(4, 3), draw(3, 5), ids
    assert_expected_inline(
        body(lowered(loss, *args, respelled=False)),
        """\
%wrap_body_0 = @wrap_body_0
%tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(%wrap_body_0, %x, %w, %ids, use_reentrant=False) : (f64[4, 1])
%getitem = operator.getitem(%tag_activation_checkpoint, 0) : f64[4, 1]
return %getitem

@wrap_body_0:
  %mm = aten.mm.default(%x, %w) : f64[4, 5]
  %_log_softmax = aten._log_softmax.default(%mm, -1, False) : f64[4, 5]
  %unsqueeze = aten.unsqueeze.default(%ids, 1) : i64[4, 1]
  %gather = aten.gather.default(%_log_softmax, -1, %unsqueeze) : f64[4, 1]
  return %gather""",
    )
    gm, report = rewritten(OpenLossCheckpoints(), loss, *args)
    assert_expected_inline(
        body(gm),
        """\
%mm = aten.mm.default(%x, %w) : f64[4, 5]
%_log_softmax = aten._log_softmax.default(%mm, -1, False) : f64[4, 5]
%unsqueeze = aten.unsqueeze.default(%ids, 1) : i64[4, 1]
%gather = aten.gather.default(%_log_softmax, -1, %unsqueeze) : f64[4, 1]
return %gather""",
    )
    assert_expected_inline(
        reasons(report), """a checkpointed loss is opened: the head's own rewrite takes its place"""
    )


def test_opened_heads_are_numbered_in_order():
    def loss(x, w, ids):
        first = checkpoint(picked, x, w, ids, use_reentrant=False)
        return first + checkpoint(picked, x.sin(), w, ids, use_reentrant=False)

    ids = torch.tensor([1, 0, 4, 2])
    gm, _ = rewritten(OpenLossCheckpoints(), loss, draw(4, 3), draw(3, 5), ids)
    numbers = [n.meta["ac_graph_id"] for n in gm.graph.nodes if "ac_graph_id" in n.meta]
    assert sorted(set(numbers)) == [1, 2]
    assert numbers == sorted(numbers)


def test_another_checkpoint_stays():
    def layer(x, w):
        return checkpoint(lambda x, w: torch.tanh(x @ w), x, w, use_reentrant=False)

    gm = lowered(layer, draw(4, 3), draw(3, 3), respelled=False)
    assert not OpenLossCheckpoints().run(gm).remarks
    assert "tag_activation_checkpoint" in print_graph(gm)


# ---------------------------------------------------------------------------- group-queries
def repeated(features):
    def attend(x):
        rows, groups, length, _ = x.shape
        keys = x[:, :, None].expand(rows, groups, 2, length, features)
        keys = keys.reshape(rows, 2 * groups, length, features)
        return F.scaled_dot_product_attention(keys.sin(), value=keys, key=keys)

    return attend


def test_repeated_keys_are_taken_back():
    x = draw(2, 3, 5, 4)
    assert_expected_inline(
        body(lowered(repeated(4), x, respelled=False)),
        """\
%unsqueeze = aten.unsqueeze.default(%x, 2) : f64[2, 3, 1, 5, 4]
%expand = aten.expand.default(%unsqueeze, [2, 3, 2, 5, 4]) : f64[2, 3, 2, 5, 4]
%clone = aten.clone.default(%expand, memory_format=contiguous_format) : f64[2, 3, 2, 5, 4]
%_unsafe_view = aten._unsafe_view.default(%clone, [2, 6, 5, 4]) : f64[2, 6, 5, 4]
%sin = aten.sin.default(%_unsafe_view) : f64[2, 6, 5, 4]
%scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%sin, %_unsafe_view, %_unsafe_view) : f64[2, 6, 5, 4]
return %scaled_dot_product_attention_default""",
    )
    gm, report = rewritten(GroupQueries(), repeated(4), x)
    assert_expected_inline(
        body(gm),
        """\
%unsqueeze = aten.unsqueeze.default(%x, 2) : f64[2, 3, 1, 5, 4]
%expand = aten.expand.default(%unsqueeze, [2, 3, 2, 5, 4]) : f64[2, 3, 2, 5, 4]
%clone = aten.clone.default(%expand, memory_format=contiguous_format) : f64[2, 3, 2, 5, 4]
%_unsafe_view = aten._unsafe_view.default(%clone, [2, 6, 5, 4]) : f64[2, 6, 5, 4]
%sin = aten.sin.default(%_unsafe_view) : f64[2, 6, 5, 4]
%scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%sin, %x, %x, enable_gqa=True) : f64[2, 6, 5, 4]
return %scaled_dot_product_attention_default""",
    )
    assert_expected_inline(
        reasons(report), """attention takes grouped queries: keys and values are not repeated"""
    )


def test_heads_that_no_kernel_takes_grouped_stay():
    gm, report = rewritten(GroupQueries(), repeated(257), draw(1, 1, 2, 257))
    assert "enable_gqa=True" not in print_graph(gm)
    assert_expected_inline(
        reasons(report), """heads of 257 features: no fused kernel takes them grouped"""
    )


# ---------------------------------------------------------------------------- eliminate-noops
@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.view(2, 6).view(3, 4).sin(), ["view"] * 0 + ["sin"]),
        (lambda x: x.reshape(-1, 1).select(1, 0).sin(), ["reshape", "sin"]),
        (lambda x: x.view(12).view(2, 6).sin(), ["view", "sin"]),
        (lambda x: x.float().double().sin(), ["_to_copy", "_to_copy", "sin"]),
        (lambda x: x.detach().sin() * x, ["detach", "sin", "mul"]),
    ],
)
def test_what_gives_back_its_operand_is_left_out(function, left):
    def call(x):
        return function(x)

    gm = lowered(call, draw(3, 4), respelled=False)
    EliminateNoops().run(gm)
    assert_equals_eager(gm, call, [draw(3, 4)])
    names = [n.target._schema.name[6:] for n in gm.graph.nodes if n.op == "call_function"]
    assert names == left


def test_a_cast_to_a_wider_dtype_and_back_is_nothing():
    def cast(x):
        return x.float().to(torch.bfloat16).sin()

    x = draw(3, 4).to(torch.bfloat16).detach()
    gm = lowered(cast, x, respelled=False)
    report = EliminateNoops().run(gm)
    assert_expected_inline(
        body(gm),
        """\
%sin = aten.sin.default(%x) : bf16[3, 4]
return %sin""",
    )
    assert_expected_inline(reasons(report), """a call that does nothing is left out""")
    assert torch.equal(gm(x)[0] if isinstance(gm(x), tuple) else gm(x), cast(x))


@pytest.mark.parametrize(
    ("narrow", "wide", "is_nothing"),
    [
        (torch.float16, torch.bfloat16, False),  # wider in range alone
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e5m2, torch.float8_e4m3fn, False),
        (torch.float8_e8m0fnu, torch.float16, False),
    ],
)
def test_a_cast_is_nothing_where_the_wider_dtype_holds_every_number(narrow, wide, is_nothing):
    def cast(x):
        return x.to(wide).to(narrow).to(torch.float32).sin()

    x = (40 * draw(3, 4).detach()).to(narrow)
    gm = lowered(cast, x, respelled=False)
    EliminateNoops().run(gm)
    assert print_graph(gm).count("aten._to_copy") == (1 if is_nothing else 3)
    torch.testing.assert_close(gm(x)[0], cast(x), rtol=0, atol=0, equal_nan=True)


def test_what_the_graph_returns_stays():
    gm = lowered(lambda x: x.view(2, 6).view(3, 4), draw(3, 4), respelled=False)
    assert not EliminateNoops().run(gm).remarks


def test_a_detach_is_nothing_where_gradients_are_values():
    gm = lowered(lambda x: x.detach().sin(), draw(3, 4), respelled=False)
    EliminateNoops(differentiated=True).run(gm)
    assert "detach" not in print_graph(gm)


# ---------------------------------------------------------------------------- drop-unused-inputs
def attend(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_mask_that_nobody_reads_is_not_kept():
    def checkpointed(x):
        at = torch.arange(x.shape[2])
        return checkpoint(attend, x, at[None, :] <= at[:, None], use_reentrant=False)

    gm = lowered(checkpointed, draw(2, 3, 5, 4), respelled=False)
    before = print_graph(gm)
    assert not DropUnusedInputs().run(gm).remarks, "its body reads the mask"
    assert print_graph(gm) == before
    RestoreCausalAttention().run(gm)
    assert_expected_inline(
        body(gm),
        """\
%arange = aten.arange.default(5, device=cpu, pin_memory=False) : i64[5]
%unsqueeze = aten.unsqueeze.default(%arange, 0) : i64[1, 5]
%unsqueeze_1 = aten.unsqueeze.default(%arange, 1) : i64[5, 1]
%le = aten.le.Tensor(%unsqueeze, %unsqueeze_1) : b8[5, 5]
%wrap_body_0 = @wrap_body_0
%tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(%wrap_body_0, %x, %le, use_reentrant=False) : (f64[2, 3, 5, 4])
%getitem = operator.getitem(%tag_activation_checkpoint, 0) : f64[2, 3, 5, 4]
return %getitem

@wrap_body_0:
  %scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%x, %x, %x, attn_mask=None, is_causal=True) : f64[2, 3, 5, 4]
  return %scaled_dot_product_attention_default""",
    )
    report = DropUnusedInputs().run(gm)
    assert_expected_inline(
        body(gm),
        """\
%wrap_body_0 = @wrap_body_0
%tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(%wrap_body_0, %x, use_reentrant=False) : (f64[2, 3, 5, 4])
%getitem = operator.getitem(%tag_activation_checkpoint, 0) : f64[2, 3, 5, 4]
return %getitem

@wrap_body_0:
  %scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%x, %x, %x, attn_mask=None, is_causal=True) : f64[2, 3, 5, 4]
  return %scaled_dot_product_attention_default""",
    )
    assert_expected_inline(
        reasons(report), """a checkpointed call does not keep what it does not read"""
    )
    assert_equals_eager(gm, checkpointed, [draw(2, 3, 5, 4)])


# ---------------------------------------------------------------------------- all passes
@pytest.mark.parametrize("one", REGISTRY.values(), ids=lambda one: one.name)
def test_passes_are_frozen_dataclasses(one):
    assert one.__dataclass_params__.frozen
    assert "__dataclass_params__" in vars(one), "it is one itself, not by its base"


# ---------------------------------------------------------------------------- select-detached-rows
def still(z, k):
    return torch.cat([z[:k].detach(), z[k:]])


def test_rows_of_which_some_are_detached_are_chosen():
    def chosen(x, w):
        return still(x @ w / 0.9, 2).log_softmax(-1)

    gm, report = rewritten(SelectDetachedRows(), chosen, draw(5, 4), draw(4, 7, seed=1))
    assert_expected_inline(
        reasons(report), """rows of which some are detached are chosen from one value"""
    )
    assert_expected_inline(
        body(gm),
        """\
%mm = aten.mm.default(%x, %w) : f64[5, 7]
%div = aten.div.Tensor(%mm, 0.9) : f64[5, 7]
%full_default = aten.full.default([2, 1], True, dtype=b8, device=cpu) : b8[2, 1]
%full_default_1 = aten.full.default([3, 1], False, dtype=b8, device=cpu) : b8[3, 1]
%cat_default = aten.cat.default([%full_default, %full_default_1], 0) : b8[5, 1]
%detach_default = aten.detach.default(%div) : f64[5, 7]
%where_self = aten.where.self(%cat_default, %detach_default, %div) : f64[5, 7]
%_log_softmax = aten._log_softmax.default(%where_self, -1, False) : f64[5, 7]
return %_log_softmax""",
    )


@pytest.mark.parametrize(
    "join",
    [
        lambda z: torch.cat([z[:, :2], z[:, 2:3].detach(), z[:, 3:-1]], 1),
        lambda z: torch.cat([z.detach()[1:2], z[2:]]),
        lambda z: torch.cat([z[:, 1:2], z[:, 2:4].detach()], 1),
        lambda z: still(2.0**z, 2),
        lambda z: still(torch.where(z > 0, z, 0.5 * z), 2),
    ],
)
def test_parts_in_their_order_are_chosen(join):
    def chosen(x, w):
        return join(x @ w).log_softmax(-1)

    gm, report = rewritten(SelectDetachedRows(), chosen, draw(3, 5, 4), draw(4, 7, seed=1))
    assert report.remarks
    assert "aten.where.self" in body(gm)


@pytest.mark.parametrize(
    "join",
    [
        lambda z: torch.cat([z[:3].detach(), z[2:]]),
        lambda z: torch.cat([z[2:].detach(), z[:2]]),
        lambda z: torch.cat([z[:4], z[4:2].detach(), z[2:]]),
        lambda z: torch.cat([z[:2].detach(), (2 * z)[2:]]),
        lambda z: torch.cat([z[:, :2].detach(), z[:, 2:]], 1),  # over the vocabulary
        lambda z: torch.cat([z[:2].detach(), z[2:].detach()]) * z,
        lambda z: torch.cat([z[::2].detach(), z[1::2]]),
        lambda z: still(z.sum(-1), 2),
    ],
)
def test_other_parts_stay_joined(join):
    def joined(x, w):
        return join(x @ w).square()

    gm, report = rewritten(SelectDetachedRows(), joined, draw(5, 4), draw(4, 7, seed=1))
    assert not report.remarks
    assert "aten.where.self" not in body(gm)
