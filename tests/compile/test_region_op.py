"""The op behind regions: any row count, aliases, missing gradients, variants, scoped options."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.variants import build_region
from fxrl.ir.region import InputSpec, Region
from fxrl.ops.region.kernels import registered


def region_of(function, examples, tiled, needs_grad):
    from torch.fx.experimental.proxy_tensor import make_fx

    # below autograd torch 2.15 traces a detach as an alias
    body = make_fx(function, pre_dispatch=True)(*examples)
    specs = zip(examples, tiled, needs_grad, strict=True)
    return Region(body, tuple(InputSpec(x.detach(), t, g) for x, t, g in specs))


def call(kernels, inputs, tile):
    return torch.ops.fxrl.region(inputs, kernels.key, tile, [])


@pytest.mark.parametrize("options", [None, InductorOptions.of(None)], ids=["op by op", "compiled"])
@pytest.mark.parametrize("cut", ["inputs", "vectors"])
def test_any_number_of_rows(cut, options):
    def product(x, w):
        return [torch.tanh(x.mm(w.t())).sum(-1)]

    trained = (True, cut == "inputs")
    region = region_of(product, (torch.randn(6, 3), torch.randn(5, 3)), (True, False), trained)
    kernels = build_region(replace(region, cut=cut), options)
    for rows in (0, 1, 2, 7, 16):
        inputs = [
            torch.randn(n, 3, requires_grad=t) for n, t in zip((rows, 5), trained, strict=True)
        ]
        leaves = [x for x in inputs if x.requires_grad]
        for tile in (0, 1, 4):
            out, *vectors = call(kernels, inputs, tile)
            assert [v.shape for v in vectors] == [(rows, 1, 3)] * (cut == "vectors")
            (expected,) = product(*inputs)
            torch.testing.assert_close(out, expected)
            weight = torch.randn(rows).expand(2, rows)[0]
            found = torch.autograd.grad((out * weight).sum(), leaves)
            wanted = torch.autograd.grad((expected * weight).sum(), leaves)
            for f, w in zip(found, wanted, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-5)


def test_outputs_that_are_views_of_inputs_get_storage_of_their_own():
    def views(x):
        return [x.view(-1), x.t(), x * 2, x[:, None].expand(3, 2, 4)]

    region = region_of(views, (torch.randn(3, 4),), (False,), (True,))
    kernels = build_region(region, None)
    x = torch.randn(3, 4, requires_grad=True)
    flat, turned, double, many = call(kernels, [x], 0)
    assert flat.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    torch.testing.assert_close(many, x[:, None].expand(3, 2, 4))
    (grad,) = torch.autograd.grad(turned.sum() + double.sum() + many.sum(), x)  # none of flat
    torch.testing.assert_close(grad, torch.full((3, 4), 5.0))
    del flat


def test_a_gradient_that_is_expanded_gets_storage_of_its_own():
    region = region_of(lambda x: [x.sum(0)], (torch.randn(3, 4),), (False,), (True,))
    x = torch.randn(3, 4, requires_grad=True)
    (out,) = call(build_region(region, None), [x], 0)
    weight = torch.randn(4)
    torch.testing.assert_close(torch.autograd.grad(out, x, weight)[0], weight.expand(3, 4))


def test_an_input_without_a_path_gets_a_zero_gradient():
    def first(x, y):
        return [x * 2 + y.detach()]

    region = region_of(first, (torch.randn(3), torch.randn(3)), (False, False), (True, True))
    kernels = build_region(region, None)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    grads = torch.autograd.grad(call(kernels, [x, y], 0)[0].sum(), [x, y])
    torch.testing.assert_close(grads, (torch.full((3,), 2.0), torch.zeros(3)))


class BySize(torch.fx.GraphModule):
    """A body that looks at its sizes, as an op's own code may."""

    def __init__(self):
        graph = torch.fx.Graph()
        graph.output((graph.placeholder("x"),))
        super().__init__(nn.Module(), graph)

    def __call__(self, x):
        return [x * 2 if x.shape[0] < 10 else x * 3]


def test_a_body_that_holds_for_some_sizes_gets_a_variant():
    by_size = BySize()
    region = Region(by_size, (InputSpec(torch.randn(6, 2), True, True),))
    kernels = build_region(region, None)
    for rows in (5, 12, 6, 40):
        x = torch.randn(rows, 2, requires_grad=True)
        (out,) = call(kernels, [x], 0)
        torch.testing.assert_close(out, by_size(x)[0])
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, torch.full_like(x, 2.0 if rows < 10 else 3.0))


def test_inductor_options_are_scoped_to_the_call():
    import torch._inductor.config as settings

    before = settings.save_config_portable()
    region = region_of(lambda x: [x.exp() + 1], (torch.randn(3, 2),), (True,), (True,))
    kernels = build_region(
        region, InductorOptions.of({"max_autotune": False, "epilogue_fusion": False})
    )
    call(kernels, [torch.randn(4, 2)], 0)
    assert settings.save_config_portable() == before


# ---------------------------------------------------------------------------- whose kernels
def times(factor):
    return region_of(lambda x: [x * factor], (torch.randn(3, 2),), (True,), (True,))


def test_kernels_live_as_long_as_somebody_holds_them():
    kernels = build_region(times(2), None)
    key = kernels.key
    x = torch.randn(3, 2, requires_grad=True)
    (out,) = call(kernels, [x], 0)
    del kernels
    gc.collect()
    assert registered(key) is not None, "the backward still needs them"
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
    del out
    gc.collect()
    assert registered(key) is None


def test_options_are_part_of_the_key():
    region = times(3)
    plain, compiled = build_region(region, None), build_region(region, InductorOptions.of(None))
    assert plain.key != compiled.key
    assert build_region(region, None) is plain
    x = torch.randn(3, 2)
    torch.testing.assert_close(call(plain, [x], 0)[0], call(compiled, [x], 0)[0])
    assert compiled.generated()
    assert not plain.generated()
