"""Random losses: rewritten graphs have eager's numbers, and what mixes tokens is refused."""

import functools
from collections import Counter
from random import Random

import pytest
import torch

from fxrl.ir.region import regions_of
from fxrl.ir.remark import RemarkKind
from fxrl.passes import REGISTRY
from tests.passes.random_losses import ARGUMENTS, MIXES, draw_loss, make_inputs, rewrite, run
from tests.rows import rows

CHUNK, ALL = ("chunk-vocab-region",), tuple(REGISTRY)
WAYS = [(CHUNK, False), (ALL, False), (ALL, True)]


def drawer(seed):
    """Draws of some candidates the one drawn least: few losses then hold the whole grammar."""
    random, drawn = Random(seed), Counter()

    def draw(options):
        if not all(isinstance(option, str) for option in options):
            return random.choice(options)  # to compare graph proxies would record that
        at = [(tuple(options), index) for index in random.choices(range(len(options)), k=4)]
        least = min(at, key=drawn.__getitem__)
        drawn[least] += 1
        return options[least[1]]

    return draw


@functools.cache
def losses():
    draw = drawer(0)
    return [draw_loss(draw) for _ in range(75)]


def assert_equal_runs(gm, rewritten, inputs):
    loss, grads = run(gm, inputs)
    found, found_grads = run(rewritten, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-9, equal_nan=True)
    trained = [name for name, x in zip(ARGUMENTS, inputs, strict=True) if x.requires_grad]
    for name, expected, got in zip(trained, grads, found_grads, strict=True):
        # a path of zeros (detach, argmax) may be no path at all for one of the two
        expected = torch.zeros(()) if expected is None else expected
        got = torch.zeros_like(expected) if got is None else got
        if expected.dim() == 0:
            expected = torch.zeros_like(got)
        torch.testing.assert_close(
            got, expected, rtol=1e-7, atol=1e-7, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# Of the first ones these hold every op of the grammar.
SELDOM = (10, 12, 19, 22, 23, 24, *range(26, 75))


@pytest.mark.parametrize("index", rows(range(75), SELDOM))
def test_rewritten_equals_eager(index):
    gm, (passes, dynamic) = losses()[index], WAYS[index % len(WAYS)]
    result = rewrite(gm, passes, dynamic=dynamic)
    assert result.report.of_kind(RemarkKind.APPLIED), f"{result.report}\n{gm.code}"
    assert_equal_runs(gm, result.graph, make_inputs())


def test_frozen_heads_equal_eager():
    """Where the forward makes the gradients, and where not."""
    trained = ("hidden", "column")
    made = Counter()
    for index, gm in enumerate(losses()[1::6]):
        result = rewrite(gm, CHUNK, dynamic=index % 2 == 1, trained=trained)
        assert_equal_runs(gm, result.graph, make_inputs(trained=trained))
        made.update(region.cut for region in regions_of(result.graph).values())
    assert min(made["vectors"], made["inputs"]) >= 3, made


MIXED = [(mix, seed) for mix in sorted(MIXES) for seed in (1, 2)]
#: Some in one loss; every way is refused alone, below.
OFTEN = [("cumsum", 1), ("matmul", 1), ("roll", 1), ("softmax", 1)]


@pytest.mark.parametrize("case", rows(MIXED, [case for case in MIXED if case not in OFTEN]))
def test_mixing_tokens_is_refused(case):
    mix, seed = case
    gm = draw_loss(drawer(f"{mix} {seed}"), mix)
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
