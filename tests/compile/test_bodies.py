"""Kept regions: the cut of the joint graph, in float64, as eager's ops and as Inductor's."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes import joint_graph
from torch.fx.experimental.proxy_tensor import make_fx

from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.trace import TracedBody
from fxrl.compile.bodies.variants import build_region
from fxrl.ir.region import InputSpec, Region
from tests.ir.test_sizes import Sizes


def draw(*sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


def layer(x, norm, w, a, b, out):
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm
    hidden = F.linear(normed, w) + F.linear(F.linear(normed, a), b) * 0.5
    return [x + F.linear(F.silu(hidden), out), hidden.softmax(-1).sum(-1)]


NEEDS = (True, False, False, True, True, False)


def inputs(rows=3, length=40):
    return [draw(rows, length, 8), draw(8), draw(64, 8), draw(2, 8), draw(64, 2), draw(8, 64)]


def region_of(function, examples, needs):
    body = make_fx(function)(*examples)
    pairs = zip(examples, needs, strict=True)
    specs = [InputSpec(x, False, need, i > 0) for i, (x, need) in enumerate(pairs)]
    return Region(body, tuple(specs), "products")


def gradients(function, given, needs):
    live = [x.clone().requires_grad_(need) for x, need in zip(given, needs, strict=True)]
    outputs = function(live)
    total = sum((o * torch.arange(o.numel()).view_as(o).to(o.dtype)).sum() for o in outputs[:2])
    wanted = [x for x in live if x.requires_grad]
    return [o.detach() for o in outputs[:2]], torch.autograd.grad(total, wanted)


def assert_equal(found, wanted, tolerance=1e-12):
    for f, w in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(f, w, rtol=tolerance, atol=tolerance * float(w.abs().max()))


@pytest.mark.parametrize("decompose", [False, True])
def test_the_two_halves_are_the_function_and_its_gradient(decompose):
    region = region_of(layer, inputs(), NEEDS)
    traced = TracedBody(region, decompose=decompose)

    def run(live):
        with torch.no_grad():
            results = traced.forward(*live)
        grads = [torch.arange(o.numel()).view_as(o).to(o.dtype) for o in results[:2]]
        places = {"input": live, "output": results}
        with torch.no_grad():
            return results, traced.backward(
                [places[kind][i] for kind, i in traced.backward.read], grads
            )

    results, grads = run(inputs())
    wanted = gradients(lambda live: layer(*live), inputs(), NEEDS)
    assert_equal((results[:2], grads), wanted)


def test_weights_are_kept_as_they_are():
    """The backward reads a weight's transpose; the weight itself lives anyway."""
    traced = TracedBody(region_of(layer, inputs(), NEEDS), decompose=True)
    assert {i for kind, i in traced.backward.read if kind == "input"} >= {2, 5}
    (output,) = traced.forward.graph.find_nodes(op="output")
    shapes = [tuple(node.meta["val"].shape) for node in output.args[0]]
    assert (8, 64) not in shapes
    assert (64, 8) not in shapes


#: Compiled ones run in every step of tests/compile/test_regions.py, and in test_region_op.py.
WAYS = [None, pytest.param(InductorOptions.of(None), marks=pytest.mark.slow)]


@pytest.mark.parametrize("options", WAYS, ids=["op by op", "compiled"])
def test_the_op_pair(options):
    region = region_of(layer, inputs(), NEEDS)
    kernels = build_region(region, options)

    def run(live):
        return torch.ops.fxrl.region(live, kernels.key, 0, [])

    wanted = gradients(lambda live: layer(*live), inputs(), NEEDS)
    assert_equal(gradients(run, inputs(), NEEDS), wanted, 1e-12 if options is None else 1e-6)


def small_region():
    """Whose halves are a kernel each."""
    return region_of(lambda x, w: [F.linear(x.tanh(), w)], [draw(5, 8), draw(6, 8)], (True, True))


def test_halves_are_lowered_as_they_were_traced_and_found_by_the_next_who_asks(monkeypatch):
    region = small_region()

    def compiled():
        gc.collect()  # it is built anew
        counters.clear()
        build_region(region, InductorOptions.of(None)).compile()
        assert counters["aot_autograd"]["total"] == 0, "AOTAutograd traced it again"

    compiled()
    monkeypatch.delattr(joint_graph, "joint_graph_passes")
    compiled()
    assert counters["inductor"]["fxgraph_cache_hit"] == 2


def test_kernels_are_waited_for_when_both_halves_are_lowered(monkeypatch):
    order = []

    def noting(owner, name, what):
        original = getattr(owner, name)

        def noted(*args, **options):
            order.append(what)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    noting(compile_fx, "compile_fx_inner", "lowered")
    noting(AsyncCompile, "wait", "waited")
    kernels = build_region(small_region(), InductorOptions.of(None))
    kernels.begin()
    assert order == ["lowered", "lowered"]
    kernels.compile()
    kernels.compile()
    assert order == ["lowered", "lowered", "waited", "waited"]


def test_fake_values_are_taken_as_they_were_traced(monkeypatch):
    class Reached(BaseException):
        pass

    def stop(*_, **__):
        raise Reached

    run = compile_fx.fake_tensor_prop
    monkeypatch.setattr(compile_fx, "FakeTensorProp", lambda *_, **__: pytest.fail("run again"))
    monkeypatch.setattr(compile_fx, "_recursive_post_grad_passes", stop)  # what is next
    region = region_of(layer, inputs(), NEEDS)
    with pytest.raises(Reached):
        build_region(region, InductorOptions.of({"force_disable_caches": True})).compile()
    assert compile_fx.fake_tensor_prop is run


def test_what_passes_add_behind_the_trace_is_lowered():
    """Adapters over one input: their gradients' products are merged, with zeros between them."""

    def adapted(x, *weights):
        w1, a1, b1, w2, a2, b2 = weights
        gate = F.linear(x, w1) + F.linear(F.linear(x, a1), b1)
        up = F.linear(x, w2) + F.linear(F.linear(x, a2), b2)
        return [gate * up, up]

    sizes = [(64, 8), (2, 8), (64, 2), (64, 8), (3, 8), (64, 3)]
    given = [draw(400, 8), *(draw(*size) for size in sizes)]
    needs = (True, *(False, True, True) * 2)
    kernels = build_region(region_of(adapted, given, needs), InductorOptions.of(None))

    def run(live):
        return torch.ops.fxrl.region(live, kernels.key, 0, [])

    wanted = gradients(lambda live: adapted(*live), given, needs)
    assert_equal(gradients(run, given, needs), wanted, 1e-6)
    assert "merge-adapter-products" in dict(kernels.traced.rewrites)


@pytest.mark.parametrize("stage", ["pre_grad_custom_pass", "joint_custom_post_pass"])
def test_a_users_own_pass_runs_where_pytorch_runs_it(stage):
    seen = []
    region = region_of(lambda x: [x.exp() + 1], [draw(3, 2)], [True])
    build_region(region, InductorOptions.of({stage: seen.append})).compile()
    assert len(seen) == 2


@pytest.mark.parametrize("options", WAYS, ids=["op by op", "compiled"])
def test_tokens_of_which_only_a_multiple_shows(options):
    """As where a mixture of experts has each token twice."""

    def function(x, w):
        return [F.linear(x, w).unflatten(0, (-1, 2)).sum(1).softmax(-1)]

    (rows,) = Sizes().tensors(lambda b, s: [(2 * s, 8)])
    specs = (InputSpec(rows.double(), False, True, False), InputSpec(draw(8, 8), False, True, True))
    kernels = build_region(Region(fx.symbolic_trace(function), specs, "products"), options)
    for count in (6, 10):
        live = [draw(count, 8).requires_grad_(), draw(8, 8).requires_grad_()]
        (out, *_), (wanted,) = torch.ops.fxrl.region(live, kernels.key, 0, []), function(*live)
        torch.testing.assert_close(out, wanted)
        found = torch.autograd.grad(out.square().sum(), live)
        torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), live))


@pytest.mark.parametrize("cut", ["products", "fewest", "inputs"])
def test_operands_of_other_strides_are_taken(cut):
    region = replace(region_of(layer, inputs(), NEEDS), cut=cut)
    kernels = build_region(region, None)
    x, *rest = inputs()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)

    def run(live):
        first = live[0].transpose(0, 1).contiguous().transpose(0, 1)
        return torch.ops.fxrl.region([first, *live[1:]], kernels.key, 0, [])

    assert not turned.is_contiguous()
    wanted = gradients(lambda live: layer(*live), [x, *rest], NEEDS)
    assert_equal(gradients(run, [x, *rest], NEEDS), wanted)


def test_matrices_of_experts_lie_as_they_were_traced():
    """A copy that Inductor laid out as its source is would have no expert's rows in one piece."""

    def experts(x, factors, ends):
        matrices = factors.permute(2, 1, 0).clone(memory_format=torch.contiguous_format)
        return [torch._grouped_mm(x, matrices, offs=ends)]

    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    given = [draw(5, 8).bfloat16(), draw(16, 8, 3).bfloat16(), ends]
    kernels = build_region(region_of(experts, given, (False,) * 3), InductorOptions.of(None))
    (found,) = torch.ops.fxrl.region(given, kernels.key, 0, [])
    torch.testing.assert_close(found, *experts(*given))


@pytest.mark.parametrize("options", WAYS, ids=["op by op", "compiled"])
@pytest.mark.parametrize("cut", ["products", "fewest"])
def test_parts_of_one_product_are_kept_as_that_product(cut, options):
    """Copies of queries, keys and values would not have the strides that the backward expects."""

    def attention(x, qkv, out):
        heads = F.linear(x, qkv).view(2, 12, 3, 2, 8).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return [F.linear(attended.transpose(1, 2).reshape(2, 12, 16), out)]

    sizes, needs = ((2, 12, 8), (48, 8), (8, 16)), (True, True, True)
    given = [draw(*size).float() for size in sizes]  # PyTorch 2.11 compiles no attention in float64
    kernels = build_region(replace(region_of(attention, given, needs), cut=cut), options)

    def run(live):
        return torch.ops.fxrl.region(live, kernels.key, 0, [])[:1]

    wanted = gradients(lambda live: attention(*live), given, needs)
    assert_equal(gradients(run, given, needs), wanted, 1e-5)


def test_only_outputs_carry_a_gradient():
    region = region_of(layer, inputs(), NEEDS)
    kernels = build_region(region, None)
    live = [x.requires_grad_(need) for x, need in zip(inputs(), NEEDS, strict=True)]
    first, second, *kept = torch.ops.fxrl.region(live, kernels.key, 0, [])
    assert first.requires_grad
    assert second.requires_grad
    assert kept
    assert not any(value.requires_grad for value in kept)
    (grad,) = torch.autograd.grad(first.sum(), live[0])  # the second output's gradient is None
    assert grad.shape == live[0].shape


def test_an_autograd_formula_that_writes_is_made_functional():
    def indexed(x, w):
        return [F.linear(x, w)[:, torch.tensor([0, 0, 1])].square()]

    examples = [draw(5, 8), draw(6, 8)]
    region = region_of(indexed, examples, (True, True))
    kernels = build_region(region, None)
    live = [x.clone().requires_grad_() for x in examples]
    (out,) = torch.ops.fxrl.region(live, kernels.key, 0, [])[:1]
    wanted = torch.autograd.grad(indexed(*live)[0].sum(), live)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), live), wanted)


def test_a_region_that_needs_no_gradient_has_a_forward_alone():
    region = region_of(layer, inputs(), (False,) * 6)
    kernels = build_region(region, None)
    first, second = torch.ops.fxrl.region(inputs(), kernels.key, 0, [])
    wanted = layer(*inputs())
    torch.testing.assert_close([first, second], wanted, rtol=1e-12, atol=1e-12)


def test_a_cast_to_a_wider_dtype_and_back_is_nothing():
    def adapted(x, w, a, b):
        wide = x.float()
        delta = F.linear(F.linear(wide.bfloat16(), a.bfloat16()), b.bfloat16())
        return [F.linear(x, w) + delta.float().bfloat16()]

    examples = [
        draw(40, 8).bfloat16(),
        draw(64, 8).bfloat16(),
        draw(2, 8).float(),
        draw(64, 2).float(),
    ]
    region = region_of(adapted, examples, (True, False, True, True))
    traced = TracedBody(region, decompose=True)
    wide = [n for half in traced.graphs[:2] for n in half.graph.nodes]
    sizes = [
        n.meta["val"].numel()
        for n in wide
        if "val" in n.meta
        and n.op == "call_function"
        and isinstance(n.meta["val"], torch.Tensor)
        and n.meta["val"].dtype == torch.float32
    ]
    assert max(sizes) == 128, "only the adapters' gradients are fp32"
