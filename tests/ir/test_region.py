"""What makes two regions one body."""

from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxrl.ir.region import InputSpec, Region


def sine() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    return fx.GraphModule({}, graph)


def on(gm: fx.GraphModule, device: str) -> Region:
    with FakeTensorMode():
        return Region(gm, (InputSpec(torch.empty(4, 4, device=device), False, True),))


def test_each_device_has_bodies_of_its_own():
    gm = sine()
    assert on(gm, "cuda:0").id != on(gm, "cuda:1").id
    assert on(gm, "cuda:0").id == on(sine(), "cuda:0").id


def test_regions_are_told_apart_by_their_ids():
    """Comparing their examples would run a kernel on tensors that have no storage."""
    region = on(sine(), "cpu")
    assert region != replace(region)
    assert region.id == replace(region).id
