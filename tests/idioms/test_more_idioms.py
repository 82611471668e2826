"""Further shapes: each applied or refused as it should be, and with the numbers of eager mode.

Sizes are symbolic where a shape computes with them, and fixed where it does not.
"""

import pytest
from idioms import make_inputs
from judge import assert_same_numbers, assert_verdict, run_both
from more_idioms import APPLY, EITHER, MORE

from tests.capture.mixer import sized
from tests.rows import rows


def test_there_are_many():
    assert len(MORE) >= 150


@pytest.mark.parametrize("name", rows(MORE, [name for name, fn in MORE.items() if fn.seldom]))
def test_shape(name):
    fn = MORE[name]
    outcome = run_both(fn, sized(fn, make_inputs))
    applied = outcome.applied if fn.verdict == EITHER else fn.verdict == APPLY
    assert_verdict(outcome, fusable=applied)
    assert_same_numbers(outcome)
