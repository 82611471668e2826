"""Commands as the README shows them."""

import shlex

import pytest

from bench.lib.shown_command import shown_commands


@pytest.mark.parametrize(
    ("ran", "shown"),
    [
        ("python -m bench.head --append --out /root/out/x.json --repeats 5", "--repeats 5"),
        ("python -m bench.head --time-limit 235 --row-limit 50 --sets 3", "--sets 3"),
        ("python -m bench.head model.id=/tmp/smollm2 steps=3", "steps=3"),
        ("python -m bench.head --peers /tmp/peers", "--peers peers"),
        ("python -m bench.head --flags a;no b;c --sets 4", "--flags 'a;no b;c' --sets 4"),
        ("python -m bench.head --flags 'a;no b'", "--flags 'a;no b'"),
        ("python -m bench.head --models a b c", "--models a b c"),
    ],
)
def test_without_the_machine(ran, shown):
    assert shown_commands(ran) == [f"python -m bench.head {shown}"]


def test_appended_runs_once_each():
    first = "python -m bench.head --shapes 1,2,3;4,5,6"
    ran = f"{first} --out a; {first} --append --out a; python -m bench.head --variants trl"
    shown = shown_commands(ran)
    assert shown == [
        "python -m bench.head --shapes '1,2,3;4,5,6'",
        "python -m bench.head --variants trl",
    ]
    assert shlex.split(shown[0])[-1] == "1,2,3;4,5,6"
