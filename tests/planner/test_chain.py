"""A step's moments; what runs op by op."""

import pytest
import torch

from fxrl.ir.plan import CutLayer
from fxrl.ir.sizes import measure_by
from fxrl.planner.chain import Option, host_bytes, moments, peak_bytes
from fxrl.planner.eager_profile import CallCost, Profile, profile
from tests.passes.lowered import lowered
from tests.planner.chains import plain_chain

KEPT, MOVING = "kept for the backward", "on the way to or from the host"


def option(kept="products", *, gpu=0, host=0, sending=None, fetching=None):
    choice = CutLayer(kept, "gpu", "host" if host else "gpu", sending=sending, fetching=fetching)
    return Option(choice, gpu, host, 1.0, 2.0, 10, 10)


def chain_of(options, *, gradients=()):
    return plain_chain([(o,) for o in options], 1000, 50, 0.5, 100.0, gradients=gradients)


def test_what_is_kept_is_gone_behind_its_layer():
    options = [option(gpu=100), option(gpu=200)]
    found = list(moments(chain_of(options), options))
    assert [(m.phase, m.layer) for m in found] == [
        ("forward", 0), ("forward", 1), ("head", 2), ("backward", 1), ("backward", 0), ("end", 0)
    ]  # fmt: skip
    assert [m.parts[KEPT] for m in found] == [0, 100, 300, 300, 100, 0]
    assert peak_bytes(chain_of(options), options) == 1000 + 300 + 50


@pytest.mark.parametrize(
    ("sending", "fetching", "forward", "head", "backward"),
    [
        ((0,) * 5, (0,) * 5, [0, 0, 0, 0, 0], 0, [0, 50, 0, 40, 30]),
        ((2,) * 5, (1,) * 5, [0, 30, 70, 70, 90], 90, [50, 90, 40, 70, 30]),
        ((2, 2, 1, 2, 1), (0, 0, 1, 0, 2), [0, 30, 70, 40, 90], 50, [90, 90, 40, 40, 30]),
        ((9,) * 5, (9,) * 5, [0, 30, 70, 70, 120], 120, [120, 120, 70, 70, 30]),
    ],
    ids=["nothing", "two and one", "mixed", "all"],
)
def test_what_is_on_its_way_is_what_choices_say(sending, fetching, forward, head, backward):
    pairs = zip((30, 40, 0, 50, 0), sending, fetching, strict=True)
    options = [option(host=h, sending=s, fetching=f) for h, s, f in pairs]
    found = list(moments(chain_of(options), options))
    assert [m.parts[MOVING] for m in found if m.phase == "forward"] == forward
    assert [m.parts[MOVING] for m in found if m.phase == "head"] == [head]
    assert [m.parts[MOVING] for m in found if m.phase == "backward"] == backward
    assert host_bytes(options) == 120


def test_gradients_stay_when_they_are_made():
    options = [option(), option()]
    found = moments(chain_of(options, gradients=(1, 10, 100, 1000)), options)
    assert [m.parts["gradients"] for m in found] == [0, 0, 1000, 1000, 1100, 1111]


# ---------------------------------------------------------------------------- op by op
N = 1000


def graph_of(function):
    gm = lowered(function, torch.rand(N, dtype=torch.double, requires_grad=True))
    return [node for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x: (x * 2).exp().sum(), 3),  # the result kept, its gradient, the operand's
        (lambda x: (x * 2 + 1 + 1).sum(), 2),  # nothing kept: two gradients, or two values
        (lambda x: ((x * 2).sin() * (x * 3).sin()).sum(), 7),  # four kept, three gradients
    ],
)
def test_values_and_gradients_that_live_at_once(function, values):
    found = profile(graph_of(function), measure_by({}), lambda node: None).peak_bytes
    assert values * 8 * N <= found < values * 8 * N + 100


def test_costs_of_calls_are_counted_where_they_run():
    nodes = graph_of(lambda x: (x * 2).exp().sum())
    alone = profile(nodes, measure_by({}), lambda node: None).peak_bytes

    def cost(node):
        return CallCost((), 7 * N, 0, 100 * N) if "exp" in str(node.target) else None

    # its own list of what it reads later stands in place of the formula's
    assert profile(nodes, measure_by({}), cost).peak_bytes == alone - 8 * N + 107 * N


def test_ops_between_two_others():
    (ahead, *inside, _) = graph_of(lambda x: (x * 2).exp().sin().sum())
    found = profile(inside, measure_by({}), lambda node: None, {ahead})
    # their input and exp's result, which is kept, then that and sin's, which is read behind them;
    # in the backward the gradients of two neighbours at a time
    assert found == Profile(2 * 8 * N, 8 * N, 2 * 8 * N)
    (first, _) = inside
    assert profile([first], measure_by({}), lambda node: None, {ahead}).forward_bytes == 2 * 8 * N
    assert profile([first], measure_by({}), lambda node: None, ()).forward_bytes == 8 * N


def test_a_sum_hands_its_gradient_on():
    nodes = graph_of(lambda x: ((x * 2).exp() + (x * 3)).sum())
    # exp's result is kept; one gradient for the sum, both of its parts, and one of the product
    found = profile(nodes, measure_by({}), lambda node: None)
    assert 2 * 8 * N <= found.backward_bytes < 2 * 8 * N + 100
