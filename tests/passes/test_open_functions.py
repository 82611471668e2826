"""``open-functions``: what stands in an ``autograd.Function`` is seen by the passes."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fxrl
from fxrl.ir.plan import CutLayer, Plan
from fxrl.ir.printer import print_graph
from fxrl.passes.open_functions import OpenFunctions
from fxrl.passes.outline_layers import OutlineLayers
from tests.capture.mixer import assert_matches_eager
from tests.passes.layered import Block, ids_batch, make_stack, square_loss
from tests.passes.lowered import lowered, plain

PASSES = ("recompute", "offload", "tile-tokens")
ONLY = fxrl.Config(passes=PASSES, compile_regions=False, on_miss="error")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- what layers call
class Silu(torch.autograd.Function):
    """An activation whose gradient is not quite its own, so that nothing else has its numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 1.25 * grad * x.sigmoid()


class Tripled(Silu):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3.0 * grad * x.sigmoid()


@torch.library.custom_op("fxrl_tests::quantized_product", mutates_args=())
def quantized_product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (codes.to(x.dtype) * scale).T


@quantized_product.register_fake
def _(x, codes, scale):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


class QuantizedProduct(torch.autograd.Function):
    """As bitsandbytes' for four bits: a kernel of its own, and the weight widened for the backward."""

    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.codes, ctx.scale = codes, scale
        return torch.ops.fxrl_tests.quantized_product(x, codes, scale)

    @staticmethod
    def backward(ctx, grad):
        return grad @ (ctx.codes.to(grad.dtype) * ctx.scale), None, None


class Normed(torch.autograd.Function):
    """Two results, of which one has no gradient, and an argument that is a number."""

    @staticmethod
    def forward(ctx, x, eps):
        size = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(x, size)
        ctx.mark_non_differentiable(size)
        return x / size, size

    @staticmethod
    def backward(ctx, grad, _):
        x, size = ctx.saved_tensors
        return grad / size - x * (grad * x).mean(-1, keepdim=True) / size**3, None


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Activated(Block):
    def mlp(self, x):
        return self.down(Silu.apply(self.up(x)))


class Quantized(Block):
    """Frozen weights in codes, of which the first is under an adapter that is trained."""

    def __init__(self, width=8, heads=2, **options):
        super().__init__(width, heads, **options)
        wide = 2 * width
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, wide, bias=False)
        for name, sizes in (("up", (wide, width)), ("down", (width, wide))):
            codes = torch.randint(0, 16, sizes, dtype=torch.uint8)
            self.register_buffer(f"{name}_codes", codes)
            self.register_buffer(f"{name}_steps", torch.rand(sizes[0], 1) / 64)

    def mlp(self, x):
        wide = QuantizedProduct.apply(x, self.up_codes, self.up_steps) + self.b(self.a(x))
        return QuantizedProduct.apply(F.silu(wide), self.down_codes, self.down_steps)


class Measured(Block):
    def mlp(self, x):
        normed, size = Normed.apply(x, 1e-3)
        return self.down(F.silu(self.up(normed))) * size


def make(block, layers=3, **options):
    return make_stack(layers, block=block, **options)


KINDS = [Activated, Quantized, Measured]


def reference_loss(model, batch):
    """A ratio to what the same weights say without gradients."""
    with torch.no_grad():
        old = model(batch["ids"])
    return ((model(batch["ids"]) - old).exp() * batch["ids"][..., None]).mean()


# ---------------------------------------------------------------------------- what it makes
class Bare(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return Silu.apply(x)


def test_applied():
    model = make(Bare, 1)
    gm = lowered(lambda b: square_loss(model, b), ids_batch(), respelled=False)
    report = OpenFunctions().run(gm)
    lines = [line for line in print_graph(gm).splitlines() if "= input" not in line]
    assert_expected_inline(
        "\n".join([*lines[1:7], *lines[lines.index("@held_0:") :]]),
        """\
%detach_default = aten.detach.default(%embedding) : f64[2, 5, 8]
%sigmoid = aten.sigmoid.default(%detach_default) : f64[2, 5, 8]
%mul = aten.mul.Tensor(%detach_default, %sigmoid) : f64[2, 5, 8]
%held_0 = @held_0
%fxrl_with_gradient = torch.ops.higher_order.fxrl_with_gradient(%held_0, 1, 1, %embedding, %mul, %detach_default) : (f64[2, 5, 8])
%getitem = operator.getitem(%fxrl_with_gradient, 0) : f64[2, 5, 8]
@held_0:
  %mul = aten.mul.Tensor(%grad, 1.25) : f64[2, 5, 8]
  %sigmoid = aten.sigmoid.default(%x) : f64[2, 5, 8]
  %mul_1 = aten.mul.Tensor(%mul, %sigmoid) : f64[2, 5, 8]
  return %mul_1""",
    )
    reasons = [remark.reason for remark in report.remarks]
    assert reasons == ["an autograd.Function is opened; its gradient is its backward"]


# ---------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("checkpointed", [False, True], ids=["open", "checkpointed"])
@pytest.mark.parametrize("block", KINDS)
def test_a_layer_is_one_body_and_has_eagers_numbers(block, checkpointed):
    cuts = CutLayer("products"), CutLayer("inputs"), CutLayer("attention", "host", "host")
    model = make(block, checkpointed=checkpointed)
    plan = Plan({f"0:blocks.{i}": cut for i, cut in enumerate(cuts)})
    step = fxrl.optimize(model, square_loss, ONLY, plan=plan)
    for shape in ((2, 5), (3, 7)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    told = [remark.reason for remark in step.report.of_kind("applied")]
    assert "blocks.0 to blocks.2 in 3 calls of 1 compiled body" in told
    assert [step.plan.choices[f"0:blocks.{i}"] for i in range(3)] == [*cuts]


@pytest.mark.parametrize("block", [Activated, Quantized])
def test_its_mlp_runs_in_tiles(block):
    """What a tile's backward reads is made again in it, the widened weight too."""
    model = make(block)
    tiled = CutLayer("attention", tile_tokens=4)
    step = fxrl.optimize(
        model, square_loss, ONLY, plan=Plan({f"0:blocks.{i}": tiled for i in range(3)})
    )
    for shape in ((2, 5), (3, 7)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    assert [step.plan.choices[f"0:blocks.{i}"] for i in range(3)] == [tiled] * 3


@pytest.mark.parametrize(("block", "layers"), [*((kind, 3) for kind in KINDS), (Block, 2)])
def test_a_reference_without_gradients_has_the_bits_of_what_is_trained(block, layers):
    """Also of a first layer whose input needs no gradient."""
    model = make(block, layers).float()
    model.embed.requires_grad_(False)
    step = fxrl.optimize(model, reference_loss, ONLY)
    batch = ids_batch()
    assert step(batch).item() == batch["ids"].float().mean().item()
    assert_matches_eager(step, reference_loss, model.double(), batch, tol=1e-12)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["open", "checkpointed"])
def test_layers_whose_functions_differ_in_their_gradient_have_bodies_of_their_own(checkpointed):
    model = make(Activated, 4, checkpointed=checkpointed)
    other = model.blocks[1]
    other.mlp = lambda x: other.down(Tripled.apply(other.up(x)))
    step = fxrl.optimize(model, square_loss, ONLY)
    assert_matches_eager(step, square_loss, model, ids_batch(), tol=1e-12)
    assert len(step.captures[0].kernels) == 2


# ---------------------------------------------------------------------------- what stays
def test_a_function_that_draws_random_numbers_cuts_its_layer():
    class Noised(Block):
        def mlp(self, x):
            return self.down(Noisy.apply(self.up(x)))

    model = make(Noised, 2)
    gm = lowered(lambda b: square_loss(model, b), ids_batch(), respelled=False)
    assert not OpenFunctions().run(gm).remarks
    report = OutlineLayers().run(gm)
    assert_expected_inline(
        plain(report),
        """applied: outline-layers @ 0:blocks.0-1: blocks.0 to blocks.1 in 4 calls of 2 compiled bodies, 2 parts each: %autograd_function_apply is an autograd.Function that could not be lowered: it draws random numbers""",
    )
