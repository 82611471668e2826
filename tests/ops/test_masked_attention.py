"""``fxrl::masked_attention`` against eager's under the dense mask, in float64; FlexAttention's ops
against it; blocks against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.nn.attention.flex_attention import create_block_mask

from fxrl.compile.bodies.flex import FlexAttention
from fxrl.ops import masked_attention as op

fxrl = torch.ops.fxrl
CAUSAL = "le(key, query)"


def drawn(seed, B, T):
    """A mask of random parts: its text, its vectors, and what it is densely [B, 1, T, T]."""
    draw = torch.Generator().manual_seed(seed)

    def number(most):
        return int(torch.randint(1, most, (), generator=draw))

    at = torch.arange(T)
    lengths = torch.randint(1, T + 1, (B, 1), generator=draw)
    ids = (torch.rand(B, T, generator=draw) < 4 / T).cumsum(1)
    size, first = number(T), number(T)
    row, column = at[:, None], at[None, :]
    padding = (at >= T - lengths)[:, None, None]
    chunk = at // size
    parts = [
        ("{0}", [padding], padding),
        ("lt(key, {0})", [lengths[:, None, None]], column < lengths[:, None, None]),
        ("eq({0}, {1})", *_equal(ids[:, None, :, None], ids[:, None, None])),
        ("eq({0}, {1})", *_equal(chunk[None, None, :, None], chunk[None, None, None])),
        (f"gt(key, sub(query, {size}))", [], column > row - size),
    ]
    text, vectors, dense = CAUSAL, [], (column <= row)[None, None]
    if number(4) == 1:  # a prefix that everybody sees
        text, dense = f"bitwise_or({text}, lt(key, {first}))", dense | (column < first)
    for part, values, square in parts:
        if number(3) == 1:
            names = [f"v{len(vectors) + i}" for i in range(2)]
            text = f"bitwise_and({text}, {part.format(*names)})"
            vectors, dense = vectors + values, dense & square
    return text, vectors, dense.expand(B, 1, T, T)


def _equal(left, right):
    return [left, right], left == right


def heads(B, T, *, H=4, G=2, D=6, E=5):
    draw = torch.Generator().manual_seed(B * T)

    def one(n, width):
        x = torch.randn(B, T, n, width, generator=draw, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    return one(H, D), one(G, D), one(G, E)


@pytest.mark.parametrize("seed", range(12))
def test_numbers_and_every_gradient_are_eagers(seed, monkeypatch):
    monkeypatch.setattr(op, "_SCORES_AT_ONCE", 1)  # several tiles of queries
    monkeypatch.setattr(op, "_BLOCKS_AT_ONCE", 1)
    B, T = 1 + seed % 3, (9, 140, 256)[seed % 3]
    text, vectors, dense = drawn(seed, B, T)
    given = heads(B, T)
    blocks = fxrl.mask_blocks(vectors, text, T, T, torch.device("cpu"))
    out, lse = fxrl.masked_attention(*given, vectors, blocks, text, 0.3)
    truth = F.scaled_dot_product_attention(*given, attn_mask=dense, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(out)
    found, right = (torch.autograd.grad((x * weights).sum(), given) for x in (out, truth))
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)
    assert torch.equal(lse.isinf(), ~dense.any(-1).expand_as(lse))

    for mine, theirs in zip(_listed(blocks), _listed(pytorchs(dense)), strict=True):
        assert mine.expand(B, -1, -1, -1).equal(theirs)


def pytorchs(dense):
    """The blocks of a mask, as PyTorch finds them."""
    made = create_block_mask(
        lambda b, h, q, k: dense[b, 0, q, k], len(dense), None, *dense.shape[2:], device="cpu"
    )
    sides = ("kv", "full_kv", "q", "full_q")
    return [getattr(made, f"{s}_{what}") for s in sides for what in ("num_blocks", "indices")]


def _listed(blocks):
    """Counts and indices of blocks as tables of bools."""
    for count, places in zip(blocks[::2], blocks[1::2], strict=True):
        first = torch.arange(places.shape[-1]) < count[..., None]
        yield torch.zeros_like(places, dtype=torch.bool).scatter(-1, places.long(), first)


@pytest.mark.parametrize(("B", "T"), [(2, 256), (1, 140)])
def test_flex_attention_computes_the_same(B, T):
    """The graphs that a GPU compiles, run op by op; one graph serves all lengths alike."""
    flex = FlexAttention(None)
    text = f"bitwise_and(bitwise_and({CAUSAL}, v0), eq(v1, v2))"
    for tokens in (T, T + 128):
        keep = torch.ones(B, tokens, dtype=torch.bool)
        keep[0, :20] = False
        ids = (torch.arange(tokens) // 50).expand(B, -1)
        vectors = [keep[:, None, None], ids[:, None, :, None], ids[:, None, None]]
        given = heads(B, tokens)
        blocks = fxrl.mask_blocks(vectors, text, tokens, tokens, torch.device("cpu"))
        out, lse = fxrl.masked_attention(*given, vectors, blocks, text, 0.3)
        weights = torch.randn_like(out)
        right = torch.autograd.grad((out * weights).sum(), given)
        with torch.no_grad():
            problem = op.Problem(*given, vectors, blocks, text, 0.3)
            mine = flex.forward(problem)
            found = flex.backward(problem, weights, *mine)
        torch.testing.assert_close(mine, (out.detach(), lse))
        torch.testing.assert_close(found, right)
        assert [x.stride() for x in (*mine, *found)] == [x.stride() for x in (out, lse, *right)]
    (variants,) = flex._known.values()
    assert len(variants) == 1


def test_what_has_a_kernel():
    wide = torch.zeros(1, 1, 2, 16)
    assert op.can_be_fast(wide, wide)
    assert not op.can_be_fast(wide.double(), wide.double())
    assert not op.can_be_fast(wide[..., :8], wide)


def test_the_ops_keep_their_promises():
    text, vectors, _ = drawn(3, 2, 9)
    query, key, value = heads(2, 9)
    blocks = fxrl.mask_blocks(vectors, text, 9, 9, torch.device("cpu"))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = (query, key, value, vectors, blocks, text, 0.3)
    opcheck(fxrl.masked_attention.default, given, test_utils=checks)
    opcheck(
        fxrl.mask_blocks.default, (vectors, text, 9, 9, torch.device("cpu")), test_utils=checks[:2]
    )


def test_queries_and_keys_may_differ_in_number():
    query, _, _ = heads(2, 7)
    _, key, value = heads(2, 11)
    text = "le(key, add(query, 4))"
    blocks = fxrl.mask_blocks([], text, 7, 11, torch.device("cpu"))
    out, _ = fxrl.masked_attention(query, key, value, [], blocks, text, 0.3)
    dense = torch.arange(11) <= torch.arange(7)[:, None] + 4
    truth = F.scaled_dot_product_attention(query, key, value, dense, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, truth)
    found, right = (torch.autograd.grad(x.square().sum(), key) for x in (out, truth))
    torch.testing.assert_close(found, right)
