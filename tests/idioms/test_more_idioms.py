"""Further shapes: each applied or refused as it should be, and with the numbers of eager mode.

Sizes are symbolic where a shape computes with them, and fixed where it does not: such graphs are
captured in half the time. The catalogue's are all symbolic.
"""

import inspect
import re

import pytest
from idioms import make_inputs
from judge import assert_same_numbers, assert_verdict, run_both
from more_idioms import APPLY, EITHER, MORE

from tests.capture.mixer import fixed
from tests.rows import rows

#: What reads sizes, or is told some.
SIZES = re.compile(
    r"\b(size|shape|numel|len|arange|(un)?flatten|view|reshape|expand|(new_)?(zeros|ones|full))\b"
)


def test_there_are_many():
    assert len(MORE) >= 150


@pytest.mark.parametrize("name", rows(MORE, [name for name, fn in MORE.items() if fn.seldom]))
def test_shape(name):
    fn = MORE[name]
    symbolic = SIZES.search(inspect.getsource(fn).partition("\n")[2])  # behind ``@shape``
    outcome = run_both(fn, make_inputs if symbolic else lambda: fixed(make_inputs()))
    applied = outcome.applied if fn.verdict == EITHER else fn.verdict == APPLY
    assert_verdict(outcome, fusable=applied)
    assert_same_numbers(outcome)
