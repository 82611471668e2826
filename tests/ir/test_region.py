"""What makes two regions one body."""

from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fxrl.ops.region.op  # noqa: F401  # whose op a call is
from fxrl.ir.region import InputSpec, Region, call_region, text_on_any_gpu


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


def test_ranks_with_a_gpu_each_have_one_text():
    """Of regions in regions too, whose ids have the numbers of the GPUs in them."""

    def nested_on(device):
        gm = sine()
        for _ in range(2):
            region, graph = on(gm, device), fx.Graph()
            x = graph.placeholder("x")
            made = graph.call_function(torch.arange, (4,), {"device": torch.device(device)})
            graph.output((*call_region(graph, region, [x], 0, [None]), made))
            gm = fx.GraphModule({}, graph)
        return gm, region

    (first, of_first), (second, of_second) = map(nested_on, ("cuda:0", "cuda:1"))
    assert of_first.id != of_second.id
    assert text_on_any_gpu(first) == text_on_any_gpu(second)
    assert of_first.id_on_any_gpu in text_on_any_gpu(second)


def test_regions_are_told_apart_by_their_ids():
    """Comparing their examples would run a kernel on tensors that have no storage."""
    region = on(sine(), "cpu")
    assert region != replace(region)
    assert region.id == replace(region).id
