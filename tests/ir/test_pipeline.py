"""A pass that leaves an unsound graph is named at once, and so is what it left."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxrl.ir.graph import eliminate_dead_code
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.pipeline import Pipeline
from fxrl.ir.plan import Plan
from fxrl.ir.verifier import GraphError

aten = torch.ops.aten


@dataclass(frozen=True)
class Plant(Normalisation[Site]):
    """Does to each call of ``tanh`` what a test says."""

    name: ClassVar[str] = "plant"
    doc: ClassVar[PassDoc] = PassDoc("tanh", "nothing", "nothing", "never")
    plant: Any = None

    def match(self, gm):
        yield from (Site(node, 0) for node in _tanh(gm))

    def respell(self, gm, site):
        self.plant(site.anchor)
        return Applied("planted", 0)


def _tanh(gm):
    return gm.graph.find_nodes(op="call_function", target=aten.tanh.default)


def graph():
    x = torch.randn(3, 5)
    return make_fx(lambda x: x.exp().tanh().sum(), tracing_mode="symbolic")(x)


def other_shape(node):
    node.meta["val"] = node.meta["val"].new_empty(4, 5)


def other_dtype(node):
    node.meta["val"] = node.meta["val"].double()


def other_operand(node):
    with node.graph.inserting_before(node):
        total = node.graph.call_function(aten.sum.default, (node.args[0],))
    total.meta["val"] = node.args[0].meta["val"].new_empty(())
    node.args = (total,)


def operand_of_other_shape(node):
    node.args[0].meta["val"] = node.meta["val"].new_empty(4, 5)


def sine_for_exp(node):
    node.args[0].target = aten.sin.default


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (other_shape, r"%tanh is said to hold torch.float32\[4, 5\].*aten.tanh.* gives"),
        (other_dtype, r"%tanh is said to hold torch.float64.*gives torch.float32"),
        (other_operand, r"%tanh is said to hold .*gives torch.float32\[\]"),
        (operand_of_other_shape, r"%exp is said to hold torch.float32\[4, 5\]"),
    ],
)
def test_an_unsound_graph_is_blamed_on_its_pass(plant, said):
    with pytest.raises(GraphError, match=f"after plant: .*{said}"):
        Pipeline((Plant(plant=plant),)).run(graph(), Plan())


def test_what_was_wrong_before_is_not_the_fault_of_a_pass():
    gm = graph()
    other_shape(next(iter(_tanh(gm))))
    rewritten = Pipeline((Plant(plant=sine_for_exp),)).run(gm, Plan())
    assert rewritten.gm.graph.find_nodes(op="call_function", target=aten.sin.default)


@dataclass(frozen=True)
class Failing(Plant):
    """Its search raises behind the first place."""

    name: ClassVar[str] = "failing"

    def match(self, gm):
        yield from super().match(gm)
        raise ZeroDivisionError("of a dim")


def test_a_search_that_fails_is_a_miss_of_its_pass_alone(monkeypatch):
    both = Pipeline((Failing(plant=sine_for_exp), Plant(plant=lambda node: None)))
    with pytest.raises(ZeroDivisionError):  # in tests
        both.run(graph(), Plan())
    monkeypatch.setattr(Pipeline, "check_values", False)  # as users run it
    rewritten = both.run(graph(), Plan())
    assert not rewritten.gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    told = [(r.kind, r.pass_name, r.reason) for r in rewritten.report.remarks]
    assert told == [
        ("missed", "failing", "its search failed: ZeroDivisionError: of a dim"),
        ("analysis", "plant", "planted"),
    ]


def test_every_site_is_told():
    gm = make_fx(lambda x: x.tanh().tanh())(torch.randn(3))
    rewritten = Pipeline((Plant(plant=lambda node: None),)).run(gm, Plan())
    assert [r.reason for r in rewritten.report.remarks] == ["planted", "planted"]


def test_an_unused_draw_stays():
    gm = make_fx(lambda x: (torch.rand(2), x * torch.rand(3))[1])(torch.randn(3))
    eliminate_dead_code(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.rand.default)) == 2
