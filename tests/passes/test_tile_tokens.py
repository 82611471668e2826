"""``tile-tokens``: a layer's MLP in tiles of tokens, a region inside the layer's region."""

import itertools
import math

import pytest
import torch
from expecttest import assert_expected_inline
from torch.profiler import ProfilerActivity, profile

import fxrl
from fxrl.ir.plan import CutLayer, Plan, TileHead
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls, regions_of
from fxrl.passes.tile_tokens import TileTokens
from tests.capture.mixer import assert_matches_eager, fixed
from tests.compile.region_cases import saved_bytes
from tests.passes.layered import Block, GatedBlock, ids_batch, make_stack, outlined, square_loss
from tests.passes.lowered import plain

TILES = Plan({f"0:blocks.{i}": CutLayer(tile_tokens=4) for i in range(4)})
OPTIONS = {"passes": ("offload", "tile-tokens"), "on_miss": "error"}
ONE_BY_ONE = fxrl.Config(**OPTIONS, compile_regions=False)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- applied
def test_an_mlp_becomes_a_region_inside_the_layers():
    gm = outlined(block=GatedBlock)
    assert_expected_inline(
        plain(TileTokens().run(gm, TILES)),
        """\
applied: tile-tokens @ 0:blocks.0: the MLP runs in tiles of 4 rows
applied: tile-tokens @ 0:blocks.1: the MLP runs in tiles of 4 rows""",
    )
    (layer,) = regions_of(gm).values()
    (inner,) = regions_of(layer.forward).values()
    assert_expected_inline(
        print_graph(inner.forward),
        """\
%rows_0 = input
%rows_1 = input
%rows_2 = input
%shared_3 = input
%shared_4 = input
%shared_5 = input
%shared_6 = input
%shared_7 = input
%shared_8 = input
%shared_9 = input
%t_default = aten.t.default(%shared_3)
%mm_default = aten.mm.default(%rows_0, %t_default)
%t_default_1 = aten.t.default(%shared_4)
%mm_default_1 = aten.mm.default(%rows_1, %t_default_1)
%mul_tensor = aten.mul.Tensor(%mm_default_1, 2.0)
%add_tensor = aten.add.Tensor(%mm_default, %mul_tensor)
%silu_default = aten.silu.default(%add_tensor)
%t_default_2 = aten.t.default(%shared_5)
%mm_default_2 = aten.mm.default(%rows_0, %t_default_2)
%t_default_3 = aten.t.default(%shared_6)
%mm_default_3 = aten.mm.default(%rows_2, %t_default_3)
%mul_tensor_1 = aten.mul.Tensor(%mm_default_3, 2.0)
%add_tensor_1 = aten.add.Tensor(%mm_default_2, %mul_tensor_1)
%mul_tensor_2 = aten.mul.Tensor(%silu_default, %add_tensor_1)
%mul_tensor_3 = aten.mul.Tensor(%mul_tensor_2, 1.0)
%t_default_4 = aten.t.default(%shared_7)
%mm_default_4 = aten.mm.default(%mul_tensor_3, %t_default_4)
%t_default_5 = aten.t.default(%shared_8)
%mm_default_5 = aten.mm.default(%mul_tensor_3, %t_default_5)
%t_default_6 = aten.t.default(%shared_9)
%mm_default_6 = aten.mm.default(%mm_default_5, %t_default_6)
%mul_tensor_4 = aten.mul.Tensor(%mm_default_6, 2.0)
%add_tensor_2 = aten.add.Tensor(%mm_default_4, %mul_tensor_4)
return %add_tensor_2""",
    )
    assert [node.args[2] for node in region_calls(layer.forward)] == [4]


def test_rows_that_products_share_are_one_input():
    gm = outlined(1, block=GatedBlock)
    TileTokens().run(gm, TILES)
    (layer,) = regions_of(gm).values()
    (inner,) = regions_of(layer.forward).values()
    assert [tuple(s.example.shape[1:]) for s in inner.inputs if s.tiled] == [(8,), (2,), (2,)]


def test_nothing_is_asked_for():
    gm = outlined()
    before = print_graph(gm)
    assert TileTokens().run(gm).remarks == ()
    assert print_graph(gm) == before


# ---------------------------------------------------------------------------- missed
class NoMlp(Block):
    def mlp(self, x):
        return torch.sin(x)


class MixedTokens(Block):
    """The wide values of a token depend on those before it."""

    def mlp(self, x):
        return self.down(torch.cumsum(self.up(x), dim=1))


@pytest.mark.parametrize("block", [NoMlp, MixedTokens])
def test_missed_where_no_row_wise_stretch_is_wide(block):
    gm = outlined(1, block=block)
    before = [print_graph(region.forward) for region in regions_of(gm).values()]
    assert_expected_inline(
        plain(TileTokens().run(gm, TILES)),
        """missed: tile-tokens @ 0:blocks.0: no stretch of row-wise products is wider than the values around it""",
    )
    assert [print_graph(region.forward) for region in regions_of(gm).values()] == before


def test_the_rest_of_what_a_plan_asks_of_such_a_layer_is_done():
    model = make_stack(1, block=MixedTokens)
    options = {"passes": OPTIONS["passes"], "compile_regions": False, "on_miss": "ignore"}
    config = fxrl.Config(**options, gpu_memory="1GiB")
    asked = CutLayer("attention", tile_tokens=4)
    step = fxrl.optimize(model, square_loss, config, plan=Plan({"0:blocks.0": asked}))
    assert_matches_eager(step, square_loss, model, ids_batch(), tol=1e-12)
    told = {remark.pass_name: remark.kind for remark in step.report.remarks}
    assert (told["recompute"], told["tile-tokens"]) == ("applied", "missed")
    (kernels,) = step.captures[0].kernels.values()
    assert kernels.region.cut == "attention"


def test_missed_by_a_plan_for_another_site():
    (remark,) = (
        TileTokens().run(outlined(1), Plan({"0:blocks.0": TileHead("tile-tokens", 4)})).remarks
    )
    assert remark.kind == "missed"
    assert "is for another site" in remark.reason


# ---------------------------------------------------------------------------- numbers
CUTS = ("products", "fewest", "attention", "inputs")
PLACES = ("gpu", "host")
#: Every value beside every other: whether there are tiles, cuts, where inputs and the rest wait,
#: whether the model checkpoints.
MIXTURE = [
    (CutLayer(cut, PLACES[t ^ (i & 1)], PLACES[t ^ (i >> 1)], 3 * t), bool(t ^ (i & 1) ^ (i >> 1)))
    for t, (i, cut) in itertools.product((0, 1), enumerate(CUTS))
]


def test_any_mixture_of_choices_has_eagers_numbers():
    choices = {f"0:blocks.{i}": choice for i, (choice, _) in enumerate(MIXTURE)}
    checkpointed = [again for _, again in MIXTURE]
    model = make_stack(len(choices), block=GatedBlock, checkpointed=checkpointed)
    step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=Plan(choices))
    for shape in ((2, 5), (2, 2)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    assert {name: step.plan.choices[name] for name in choices} == choices


def test_tiles_of_any_size():
    tiles = (1, 7, 1000)
    model = make_stack(len(tiles))
    plan = {f"0:blocks.{i}": CutLayer("attention", tile_tokens=t) for i, t in enumerate(tiles)}
    step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=Plan(plan))
    for shape in ((2, 5), (3, 7), (1, 1)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)


@pytest.mark.slow  # as groups of heads, whose layers are in tiles, too, in test_group_heads.py
def test_compiled():
    model = make_stack(2, checkpointed=True).float()
    plan = Plan({f"0:blocks.{i}": CutLayer("attention", tile_tokens=4) for i in range(2)})
    step = fxrl.optimize(model, square_loss, fxrl.Config(**OPTIONS), plan=plan)
    batch = fixed(ids_batch())  # sizes that vary: tests/compile/test_region_op.py
    assert_matches_eager(step, square_loss, model, batch, tol=1e-5)
    for kernels in step.captures[0].kernels.values():
        assert "def call" in kernels.generated()["forward.py"]
    assert step.verify(batch).ok


# ---------------------------------------------------------------------------- what it is for
def widest_rows(work, width):
    """The most rows that an op ever reads of a value of this width."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        work()
    shapes = [shape for event in seen.events() for shape in event.input_shapes or ()]
    return max(math.prod(shape[:-1]) for shape in shapes if shape and shape[-1] == width)


def test_no_more_than_a_tile_is_wide():
    model, batch, rows = make_stack(2, block=GatedBlock), fixed(ids_batch(4, 16)), {}
    for tile in (0, 16):
        plan = Plan({f"0:blocks.{i}": CutLayer("attention", tile_tokens=tile) for i in range(2)})
        step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=plan)
        step(batch).backward()
        rows[tile] = widest_rows(lambda step=step: step(batch).backward(), 20)
    assert rows == {0: 64, 16: 16}


def test_wide_products_are_not_kept():
    model, batch, kept = make_stack(2, block=GatedBlock), fixed(ids_batch(4, 16)), {}
    for tile in (0, 8):
        plan = Plan({f"0:blocks.{i}": CutLayer("products", tile_tokens=tile) for i in range(2)})
        step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=plan)
        step(batch)
        kept[tile] = saved_bytes(lambda step=step: step(batch))
    assert kept[0] - kept[8] >= 2 * 2 * 64 * 20 * 8, "two wide products a layer, in float64"
