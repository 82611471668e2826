"""Random losses: rewritten graphs have eager's numbers, and what mixes tokens is refused."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fxrl.ir.remark import RemarkKind
from fxrl.passes import REGISTRY
from tests.passes.random_losses import LEAVES, MIXES, draw_loss, make_inputs, rewrite, run

CHUNK, ALL = ("chunk-vocab-region",), tuple(REGISTRY)
COMMON = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),  # shrinking a program takes minutes, reading it not
}


def drawer(data):
    """Draws by position: hypothesis would compare the options, and graph proxies record that."""
    return lambda options: options[data.draw(st.integers(0, len(options) - 1))]


def assert_equal_runs(gm, rewritten, inputs):
    loss, grads = run(gm, inputs)
    found, found_grads = run(rewritten, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-9, equal_nan=True)
    for name, expected, got in zip(LEAVES, grads, found_grads, strict=True):
        # a path of zeros (detach, argmax) may be no path at all for one of the two
        expected = torch.zeros(()) if expected is None else expected
        got = torch.zeros_like(expected) if got is None else got
        if expected.dim() == 0:
            expected = torch.zeros_like(got)
        torch.testing.assert_close(
            got, expected, rtol=1e-7, atol=1e-7, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=300, **COMMON)
@given(st.data())
def test_rewritten_equals_eager(data):
    gm = draw_loss(drawer(data))
    dynamic, passes = data.draw(st.sampled_from([(False, CHUNK), (False, ALL), (True, ALL)]))
    result = rewrite(gm, passes, dynamic=dynamic)
    assert result.report.of_kind(RemarkKind.APPLIED), f"{result.report}\n{gm.code}"
    assert_equal_runs(gm, result.graph, make_inputs())


@settings(max_examples=60, **COMMON)
@given(st.data())
def test_mixing_tokens_is_refused(data):
    mix = data.draw(st.sampled_from(sorted(MIXES)))
    gm = draw_loss(drawer(data), mix)
    result = rewrite(gm, CHUNK, dynamic=False)
    missed = result.report.of_kind(RemarkKind.MISSED)
    assert missed, f"{mix} was not refused\n{result.report}\n{gm.code}"
    assert all(remark.reason for remark in missed)
    assert_equal_runs(gm, result.graph, make_inputs())


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_every_mix_alone_is_refused(mix):
    gm = draw_loss(lambda options: next(iter(options)), mix)
    result = rewrite(gm, ALL, dynamic=False)
    assert len(result.report.of_kind(RemarkKind.MISSED)) >= 1
    assert_equal_runs(gm, result.graph, make_inputs())
