"""Helpers over graphs: what is computed twice."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxrl.ir.graph import share_repeats


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.exp() + x.exp(), 2),
        (lambda x: (x.exp().sin() * x.exp().sin()).sum(), 4),  # what follows is equal, too
        (lambda x: x * 1.0 + x * 1 + x * True, 5),  # three multipliers
        (lambda x: torch.copysign(x, -0.0) + torch.copysign(x, 0.0), 3),
        (lambda x: x.sum([0]) + x.sum([1]) + x.sum([0]), 4),
        (lambda x: torch.bernoulli(x * 0) + torch.bernoulli(x * 0), 4),  # draws differ
        (lambda x: (x.exp(), x.exp()), 2),  # each result is written into by itself
        (lambda x: (x.exp().t(), x.exp().t() + 1), 5),  # so is what it looks at
    ],
)
def test_equal_calls_are_made_once(function, left):
    x = torch.randn(4, 4, dtype=torch.float64)
    gm = make_fx(function)(x)
    share_repeats(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert sum(node.op == "call_function" for node in gm.graph.nodes) == left
    torch.testing.assert_close(gm(x), function(x), rtol=0, atol=0)
