"""The printed form: what stands in it, and that nothing else does."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrl.ir.printer import dtype_name, input_name, print_graph


def logprob(hidden, weight, index):
    logits = hidden @ weight.t() / 0.9
    return logits.log_softmax(-1).gather(-1, index), hidden.size(0) * 2 + 1


def trace():
    hidden, weight = torch.randn(4, 8), torch.randn(97, 8)
    index = torch.zeros(4, 1, dtype=torch.int64)
    return make_fx(logprob, tracing_mode="symbolic")(hidden, weight, index)


def test_symbolic_graph():
    assert_expected_inline(
        print_graph(trace()),
        """\
%hidden_1 = input : f32[s0, s1]
%weight_1 = input : f32[s2, s1]
%index_1 = input : i64[s0, 1]
%t = aten.t.default(%weight_1) : f32[s1, s2]
%mm = aten.mm.default(%hidden_1, %t) : f32[s0, s2]
%div = aten.div.Tensor(%mm, 0.9) : f32[s0, s2]
%_log_softmax = aten._log_softmax.default(%div, -1, False) : f32[s0, s2]
%gather = aten.gather.default(%_log_softmax, -1, %index_1) : f32[s0, 1]
%sym_size_int = aten.sym_size.int(%hidden_1, 0) : s0
%mul = operator.mul(%sym_size_int, 2) : 2*s0
%add = operator.add(%mul, 1) : 2*s0 + 1
return %gather, %add""",
    )


def test_symbols_count_from_zero_however_old_the_shape_env_is():
    """Two traces give the first dim other symbols; the text does not show which."""

    def swap(a, b):
        return b.sum(0), a.sum(0)

    args = torch.randn(3, 5), torch.randn(4, 6)
    text = print_graph(make_fx(swap, tracing_mode="symbolic")(*args))
    assert "%a_1 = input : f32[s0, s1]\n%b_1 = input : f32[s2, s3]\n" in text
    graph = make_fx(swap, tracing_mode="symbolic")(*args).graph
    a, b, *_ = graph.nodes
    a.prepend(b)  # now b's symbols are seen first
    assert print_graph(graph).startswith("%b_1 = input : f32[s0, s1]\n%a_1 = input : f32[s2, s3]\n")


def captured(function, *args):
    """The graph as Dynamo delivers it."""
    graphs = []

    def backend(gm, _):
        graphs.append(print_graph(gm))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def test_dynamo_names_and_grad():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh())

    def loss(batch):
        return model(batch["input_ids"].float()).mul(batch["mask"]).sum()

    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "mask": torch.ones(2, 1)}
    assert_expected_inline(
        captured(loss, batch),
        """\
%batch.input_ids = input : i64[2, 4]
%model.0.weight = input : f32[6, 4] grad
%batch.mask = input : f32[2, 1]
%float_1 = %batch.input_ids.float() : f32[2, 4]
%input_1 = torch._C._nn.linear(%float_1, %model.0.weight, None) : f32[2, 6]
%input_2 = torch.tanh(%input_1) : f32[2, 6]
%mul = %input_2.mul(%batch.mask) : f32[2, 6]
%sum_1 = %mul.sum() : f32[]
return %sum_1""",
    )


def hand_made():
    """A graph with everything a literal can be."""
    body = fx.Graph()
    body.output((body.placeholder("x"),))
    root = torch.nn.Module()
    root.region_0 = fx.GraphModule(torch.nn.Module(), body)
    root.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = (torch.empty(2), None, 3)
    weight = graph.get_attr("weight")
    literals = (1e-6, True, None, "none", [x, -1], slice(None, x, 2), ..., float("-inf"))
    kinds = {"dtype": torch.float16, "device": torch.device("cpu"), "layout": torch.strided}
    a = graph.call_function(max, literals)
    a = graph.call_function(torch.ops.aten.to.dtype_layout, (a,), kinds)
    b = graph.call_module("region_0", (a,))
    c = graph.call_function(operator.getitem, (b, 0))
    d = graph.call_method("view", (c, (2, 1)))
    e = graph.call_function(torch.add, (d, weight))
    graph.output({"loss": e, "all": [c, None]})
    gm = fx.GraphModule(root, graph)
    e.kwargs = {"f": torch.nn.functional.silu, "g": object(), "h": torch.ones(2, 3)}
    return gm


def test_literals():
    assert_expected_inline(
        print_graph(hand_made()),
        """\
%x = input : (f32[2], none, int)
%weight = @weight : bf16[2] grad
%max_1 = builtins.max(1e-06, True, None, 'none', [%x, -1], slice(None, %x, 2), ..., -inf)
%to_dtype_layout = aten.to.dtype_layout(%max_1, dtype=f16, device=cpu, layout=strided)
%region_0 = @region_0(%to_dtype_layout)
%getitem = operator.getitem(%region_0, 0)
%view = %getitem.view((2, 1))
%add = torch.add(%view, %weight, f=torch.nn.functional.silu, g=<object object>, h=f32[2, 3])
return {'loss': %add, 'all': [%getitem, None]}

@region_0:
  %x = input
  return %x""",
    )


def test_ranks_with_a_gpu_each_have_one_text():
    """Which one it is is no matter of theirs; elsewhere it is part of what a graph is."""

    def graph_on(device):
        graph = fx.Graph()
        graph.output(graph.call_function(torch.arange, (4,), {"device": torch.device(device)}))
        return graph

    texts = {print_graph(graph_on(device), device_numbers=False) for device in ("cuda:0", "cuda:1")}
    assert texts == {"%arange = torch.arange(4, device=cuda)\nreturn %arange"}
    assert "device=cuda:1)" in print_graph(graph_on("cuda:1"))


def test_ambiguous_names_stay_as_they_are():
    graph = fx.Graph()
    a, b = graph.placeholder("L_batch_x_"), graph.placeholder("L_batch__x_")
    graph.output((a, b))
    text = print_graph(graph)
    assert "%batch.x" not in text
    assert {line.split()[0] for line in text.splitlines()[:2]} == {f"%{a.name}", f"%{b.name}"}


def test_no_types_no_colon():
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    assert print_graph(graph) == "%x = input\n%add = operator.add(%x, 1)\nreturn %add"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.float64, "f64"),
        (torch.int64, "i64"),
        (torch.int8, "i8"),
        (torch.uint8, "u8"),
        (torch.bool, "b8"),
        (torch.complex64, "c64"),
        (torch.float8_e4m3fn, "f8e4m3"),
        (torch.float8_e5m2, "f8e5m2"),
        (torch.float8_e4m3fnuz, "f8e4m3fnuz"),
        (torch.float8_e8m0fnu, "f8e8m0fnu"),
    ],
)
def test_dtype_name(dtype, name):
    assert dtype_name(dtype) == name


@pytest.mark.parametrize(
    ("dynamo", "name"),
    [
        ("L_batch_input_ids_", "batch.input_ids"),
        ("l_batch_input_ids_", "batch.input_ids"),
        ("l_batch_mask__1", "batch.mask"),
        ("L_self_modules_lm_head_parameters_weight_", "self.lm_head.weight"),
        ("L_model_modules_layers_modules_0_buffers_inv_freq_", "model.layers.0.inv_freq"),
        ("primals_1", "primals_1"),
        ("arg0_1", "arg0_1"),
        ("g_weight", "g_weight"),
        ("l_1", "l_1"),
        ("logits_", "logits_"),
    ],
)
def test_input_name(dynamo, name):
    assert input_name(dynamo) == name
