"""``open-layer-checkpoints``: the user's checkpointing of a layer becomes a cut of its region."""

import re
from functools import partial

import torch
from expecttest import assert_expected_inline
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxrl.ir.printer import print_graph
from fxrl.passes.open_layer_checkpoints import OpenLayerCheckpoints
from fxrl.passes.outline_layers import OutlineLayers
from tests.passes.lowered import lowered, plain, runnable


def layer(x, w):
    return torch.tanh((x @ w).sin()) * 2


def plainly(x, w):
    return checkpoint(layer, x, w, use_reentrant=False)


def by_policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def selectively(x, w):
    contexts = partial(create_selective_checkpoint_contexts, by_policy)
    return checkpoint(layer, x, w, use_reentrant=False, context_fn=contexts)


def outlined(function):
    x, w = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gm = lowered(function, x, w)
    OutlineLayers().run(gm)
    return gm, (x, w)


def lines(gm):
    """The graph without its inputs; regions without their hashes."""
    kept = (line for line in print_graph(gm).splitlines() if "= input" not in line)
    return "\n".join(re.sub(r"'[0-9a-f]{16}'", "'...'", line) for line in kept)


def test_applied():
    gm, given = outlined(plainly)
    assert_expected_inline(
        lines(gm),
        """\
%wrap_body_0 = @wrap_body_0
%tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(%wrap_body_0, %x, %w, use_reentrant=False) : (f64[4, 4])
%getitem = operator.getitem(%tag_activation_checkpoint, 0) : f64[4, 4]
return %getitem

@wrap_body_0:
  %region_default = fxrl.region.default([%x, %w], '...', 0, []) : (f64[4, 4])
  %getitem = operator.getitem(%region_default, 0) : f64[4, 4]
  return %getitem""",
    )
    report = OpenLayerCheckpoints().run(gm)
    assert_expected_inline(
        lines(gm),
        """\
%region_default = fxrl.region.default([%x, %w], '...', 0, []) : (f64[4, 4])
%getitem_1 = operator.getitem(%region_default, 0) : f64[4, 4]
return %getitem_1""",
    )
    assert_expected_inline(
        plain(report),
        """analysis: open-layer-checkpoints @ 0:loss/tag_activation_checkpoint: the user's checkpointing of a layer is taken over""",
    )
    found, wanted = runnable(gm)(*given)[0], layer(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pairs = [torch.autograd.grad(y.square().sum(), given) for y in (found, wanted)]
    torch.testing.assert_close(*pairs, rtol=1e-11, atol=1e-11)


def test_missed_what_says_itself_what_it_saves():
    gm, _ = outlined(selectively)
    assert_expected_inline(
        plain(OpenLayerCheckpoints().run(gm)),
        """analysis: open-layer-checkpoints @ 0:loss/tag_activation_checkpoint: selective checkpointing (context_fn) says itself what the layer keeps; checkpoint the layer without context_fn""",
    )
    assert "tag_activation_checkpoint" in print_graph(gm)
