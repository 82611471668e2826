"""``restore-causal-attention``: causal masks are proven, others stay, numbers agree."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.utils.checkpoint import checkpoint

from fxrl.ir.plan import Keep, Plan
from fxrl.ir.printer import print_graph
from fxrl.passes.restore_causal_attention import RestoreCausalAttention
from tests.passes.lowered import call, lowered


def queries(seed=0, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, tokens, 4, generator=generator, dtype=torch.float64).requires_grad_()


def attend(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def causal(x):
    at = torch.arange(x.shape[2])
    return attend(x, (at[None, :] <= at[:, None])[None, None].expand(2, 1, -1, -1))


def greater_or_equal(x):
    at = torch.arange(x.shape[2]) + 7
    return attend(x, at[:, None] >= at[None, :])


def with_true_factors(x):
    at = torch.arange(x.shape[2])
    mask = x.new_ones((), dtype=torch.bool) & (at[None, :] <= at[:, None])
    mask = mask & x.new_full((1, 1), 2).bool() & torch.zeros(1).eq(0)
    return attend(x, mask)


def one_packed_sequence(x):
    """Positions 0, 1, 2, ...: the detection of packed sequences finds one, whatever the length."""
    position = torch.arange(x.shape[2])[None].expand(2, -1)
    before = torch.cat([position[:, :1] - 1, position], -1)
    sequence = ((before[:, 1:] - before[:, :-1]) != 1).cumsum(-1)
    at = torch.arange(x.shape[2])
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    return attend(x, (at[None, :] <= at[:, None]) & same)


def positions_looked_up(x):
    """Masks made from a table of positions, indexed by sequence and token."""
    count = x.shape[2]
    table = torch.arange(count)[None].expand(2, -1)
    rows = torch.arange(2)[:, None, None, None]
    at = torch.arange(count)
    query, key = table[rows, at[None, None, :, None]], table[rows, at[None, None, None, :]]
    return attend(x, key <= query)


def checkpointed(x):
    at = torch.arange(x.shape[2])
    return checkpoint(attend, x, at[None, :] <= at[:, None], use_reentrant=False)


@pytest.mark.parametrize(
    "attention",
    [
        causal,
        greater_or_equal,
        with_true_factors,
        one_packed_sequence,
        positions_looked_up,
        checkpointed,
    ],
    ids=lambda attention: attention.__name__,
)
def test_a_proven_mask_becomes_is_causal_with_equal_numbers(attention):
    x = queries()
    gm = lowered(attention, x, respelled=False)
    (remark,) = RestoreCausalAttention().run(gm).remarks
    assert remark.kind == "applied"
    assert "is_causal=True" in print_graph(gm)
    result = call(gm, x=x)
    expected = attention(x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    (found,) = torch.autograd.grad((result * weights).sum(), x)
    (truth,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def strictly_before(x):
    at = torch.arange(x.shape[2])
    return attend(x, (at[None, :] <= at[:, None] - 1) | (at[None, :] == 0))


def shifted(x):
    at = torch.arange(x.shape[2])
    return attend(x, at[None, :] <= at[:, None] + 1)


def window(x):
    at = torch.arange(x.shape[2])
    return attend(x, (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 2))


def anti_causal(x):
    at = torch.arange(x.shape[2])
    return attend(x, at[:, None] <= at[None, :])


def padded(x):
    at = torch.arange(x.shape[2])
    present = x[:, 0, :, 0].detach() > -10
    return attend(x, (at[None, :] <= at[:, None]) & present[:, None, None, :])


@pytest.mark.parametrize(
    "attention",
    [strictly_before, shifted, window, anti_causal, padded],
    ids=lambda attention: attention.__name__,
)
def test_any_other_mask_stays(attention):
    gm = lowered(attention, queries(), respelled=False)
    before = print_graph(gm)
    (remark,) = RestoreCausalAttention().run(gm).remarks
    assert remark.kind == "analysis"
    why = "it depends on the values of x" if attention is padded else "it is not plainly causal"
    assert remark.reason == f"1 attention calls are under another mask: {why}"
    assert bool(remark.cure) == (attention is padded)
    assert print_graph(gm) == before


def test_the_rewritten_graph_has_no_mask():
    gm = lowered(causal, queries(), respelled=False)
    report = RestoreCausalAttention().run(gm)
    assert_expected_inline(
        print_graph(gm),
        """\
%x = input : f64[2, 3, 5, 4]
%scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%x, %x, %x, attn_mask=None, is_causal=True) : f64[2, 3, 5, 4]
return %scaled_dot_product_attention_default""",
    )
    assert_expected_inline(
        str(report.remarks[0].reason), """1 attention calls use is_causal instead of a mask"""
    )


def test_missed_when_the_plan_keeps_it():
    gm = lowered(causal, queries(), respelled=False)
    (site,) = RestoreCausalAttention().match(gm)
    plan = Plan({site.name: Keep("a dense mask is wanted", missed=False)})
    (remark,) = RestoreCausalAttention().run(gm, plan).remarks
    assert (remark.kind, remark.reason) == ("analysis", "a dense mask is wanted")
