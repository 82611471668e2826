"""A step's moments, seconds of its transfers; what runs op by op."""

import pytest
import torch

from fxrl.ir.plan import CutLayer
from fxrl.ir.sizes import measure_by
from fxrl.planner.chain import Chain, Option, host_bytes, moments, peak_bytes, step_seconds
from fxrl.planner.eager_profile import CallCost, peak
from tests.passes.lowered import lowered

KEPT, MOVING = "kept for the backward", "on the way to or from the host"


def option(kept="products", *, gpu=0, host=0, forward_s=1.0, backward_s=2.0, running=10):
    choice = CutLayer(kept, "gpu", "host" if host else "gpu")
    return Option(choice, gpu, host, forward_s, backward_s, running, running)


def chain_of(options, *, link=100.0, gradients=()):
    return Chain(tuple((o,) for o in options), 1000, 50, 0.5, link, gradients)


def test_what_is_kept_is_gone_behind_its_layer():
    options = [option(gpu=100), option(gpu=200)]
    found = list(moments(chain_of(options), options))
    assert [(m.phase, m.layer) for m in found] == [
        ("forward", 0), ("forward", 1), ("head", 2), ("backward", 1), ("backward", 0), ("end", 0)
    ]  # fmt: skip
    assert [m.parts[KEPT] for m in found] == [0, 100, 300, 300, 100, 0]
    assert peak_bytes(chain_of(options), options) == 1000 + 300 + 50


def test_the_last_stores_are_held_until_a_fetch():
    options = [option(host=h) for h in (30, 40, 0, 50, 0)]
    found = list(moments(chain_of(options), options))
    assert [m.parts[MOVING] for m in found if m.phase == "forward"] == [0, 30, 70, 70, 90]
    assert [m.parts[MOVING] for m in found if m.phase == "head"] == [90]
    assert [m.parts[MOVING] for m in found if m.phase == "backward"] == [90, 90, 40, 70, 30]
    assert host_bytes(options) == 120


def test_gradients_stay_when_they_are_made():
    options = [option(), option()]
    found = moments(chain_of(options, gradients=(1, 10, 100, 1000)), options)
    assert [m.parts["gradients"] for m in found] == [0, 0, 1000, 1100, 1110, 1111]


def test_a_slow_link_is_waited_for():
    inside = [option(host=50)] * 2  # 0.5 s of the link, 1 s of the layer
    assert step_seconds(chain_of(inside), inside) == 0.5 + 2 * (1 + 2)
    outside = [option(host=150)] * 2
    assert step_seconds(chain_of(outside), outside) == 0.5 + 2 * (1.5 + 2)
    mixed = [option(host=150), option("inputs")]  # a link that rests later does not help
    assert step_seconds(chain_of(mixed), mixed) == 0.5 + (1.5 + 2) + (1 + 2)


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
    found = peak(graph_of(function), measure_by({}), lambda node: None)
    assert values * 8 * N <= found < values * 8 * N + 100


def test_costs_of_calls_are_counted_where_they_run():
    nodes = graph_of(lambda x: (x * 2).exp().sum())
    alone = peak(nodes, measure_by({}), lambda node: None)

    def cost(node):
        return CallCost((), 7 * N, 0, 100 * N) if "exp" in str(node.target) else None

    # its own list of what it reads later stands in place of the formula's
    assert peak(nodes, measure_by({}), cost) == alone - 8 * N + 107 * N
