"""``recompute``: what the backward of an outlined layer gets, as the plan says."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fxrl
import fxrl.errors
from fxrl.errors import PlanError
from fxrl.ir.plan import CutLayer, Keep, Plan, TileHead, describe
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls, regions_of
from fxrl.passes.recompute import Recompute
from tests.capture.mixer import assert_matches_eager, assert_same, fixed, gradients
from tests.compile.region_cases import saved_bytes
from tests.passes.layered import Block, ids_batch, make_stack, outlined, square_loss
from tests.passes.lowered import lowered, plain
from tests.rows import rows

OPTIONS = {"passes": ("recompute",), "compile_regions": False, "on_miss": "error"}
WRITING = OPTIONS | {"passes": ("recompute", "offload")}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def test_products_are_kept_where_nothing_is_planned():
    gm = outlined()
    assert_expected_inline(
        plain(Recompute().run(gm)),
        """\
applied: recompute @ 0:blocks.0: keep: matrix products; norms and activations run again (saves 720 B)
applied: recompute @ 0:blocks.1: keep: matrix products; norms and activations run again (saves 720 B)""",
    )
    assert {region.cut for region in regions_of(gm).values()} == {"products"}


def test_the_plan_chooses_layer_by_layer():
    gm = outlined()
    plan = Plan({"0:blocks.1": CutLayer("inputs")})
    assert_expected_inline(
        plain(Recompute().run(gm, plan)),
        """\
applied: recompute @ 0:blocks.0: keep: matrix products; norms and activations run again (saves 720 B)
applied: recompute @ 0:blocks.1: recompute: only its inputs are kept (saves 6.953 KiB)""",
    )
    cuts = [(c.meta["region"].layer, c.meta["region"].cut) for c in region_calls(gm)]
    assert cuts == [("0:blocks.0", "products"), ("0:blocks.1", "inputs")]


def test_a_layer_may_make_the_next_ones_input_again():
    gm = outlined(3)
    plan = Plan(
        {
            "0:blocks.0": CutLayer("attention", "gpu", "again"),
            "0:blocks.1": CutLayer("products", "again"),
            "0:blocks.2": CutLayer("inputs", "again"),
        }
    )
    assert_expected_inline(
        plain(Recompute().run(gm, plan)),
        """\
applied: recompute @ 0:blocks.0: recompute: only its inputs are kept; its forward runs again and hands over what attention returned (saves 6.953 KiB)
applied: recompute @ 0:blocks.1: keep: matrix products; norms and activations run again; the layer before makes its input again (saves 1.328 KiB)
applied: recompute @ 0:blocks.2: recompute: only its inputs are kept; the layer before makes its input again (saves 7.578 KiB)""",
    )
    regions = [call.meta["region"] for call in region_calls(gm)]
    cuts = [("attention", "forward"), ("products", "outputs"), ("inputs", "never")]
    assert [(region.cut, region.again) for region in regions] == cuts
    assert [call.args[5:] for call in region_calls(gm)] == [(), ([0],), ([0],)]


def test_a_checkpointed_layer_keeps_its_input():
    assert_expected_inline(
        plain(Recompute().run(outlined(checkpointed=True))),
        """\
applied: recompute @ 0:blocks.0: recompute: the user's checkpointing keeps only its input
applied: recompute @ 0:blocks.1: recompute: the user's checkpointing keeps only its input""",
    )


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (Keep("as it is"), "as it is"),
        (TileHead("recompute", 4), "is for another site"),
    ],
)
def test_missed_by_the_plan(choice, reason):
    gm = outlined(1)
    before = print_graph(gm)
    (remark,) = Recompute().run(gm, Plan({"0:blocks.0": choice})).remarks
    assert remark.kind == "missed"
    assert reason in remark.reason
    assert print_graph(gm) == before


def test_nothing_is_outlined_no_remark():
    gm = lowered(lambda x: torch.tanh(x * 2 + 1).square().mean(), torch.randn(3, 4))
    assert Recompute().run(gm).remarks == ()


@pytest.mark.parametrize(
    "cuts",
    rows(
        [("products",) * 2, ("inputs", "products"), ("inputs",) * 2],
        [("products",) * 2, ("inputs",) * 2],
    ),
)
def test_every_plan_gives_the_same_numbers(cuts):
    model = make_stack(2)
    plan = Plan({f"0:blocks.{i}": CutLayer(cut) for i, cut in enumerate(cuts)})
    plan = Plan.from_json(plan.to_json())
    step = fxrl.optimize(model, square_loss, fxrl.Config(**OPTIONS), plan=plan)
    for shape in ((2, 5), (3, 8)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    assert [step.plan.choices[f"0:blocks.{i}"].kept for i in range(2)] == list(cuts)
    assert step.verify(ids_batch()).ok


def test_a_plan_for_another_model_is_said_to_be():
    plan = Plan({"0:block.1": CutLayer("inputs"), "1:blocks.0": CutLayer("inputs")})
    step = fxrl.optimize(make_stack(2), square_loss, fxrl.Config(**OPTIONS), plan=plan)
    with pytest.raises(fxrl.errors.MissedRewriteError) as raised:
        step(fixed(ids_batch()))
    assert_expected_inline(
        str(raised.value),
        """missed: plan @ 0:block.1: the plan names this site, and there is none; did you mean '0:blocks.1'?; print(step.plan) shows the sites that there are""",
    )


def test_a_plan_outlines_layers_that_are_too_small_to_pay():
    config = fxrl.Config(compile_regions=False, on_miss="error")
    plan = Plan({"0:blocks.1": CutLayer("inputs")})
    step = fxrl.optimize(make_stack(2), square_loss, config, plan=plan)
    step(fixed(ids_batch())).backward()
    assert step.plan.choices["0:blocks.1"] == CutLayer("inputs")


class NoMlp(Block):
    def mlp(self, x):
        return torch.sin(x)


def test_what_one_pass_refuses_others_still_do():
    """No stretch of these layers is wide enough for tiles; their inputs go to the host all the
    same, and the plan that comes out is the one that went in."""
    plan = Plan({f"0:blocks.{i}": CutLayer("inputs", "host", "gpu", 8) for i in range(2)})
    options = OPTIONS | {"passes": ("tile-tokens", "offload"), "on_miss": "ignore"}
    step = fxrl.optimize(make_stack(2, block=NoMlp), square_loss, fxrl.Config(**options), plan=plan)
    step(fixed(ids_batch()))
    told = {(r.pass_name, str(r.kind)) for r in step.report.remarks if r.site == "0:blocks.1"}
    assert told >= {("recompute", "applied"), ("tile-tokens", "missed"), ("offload", "applied")}
    assert step.plan.choices["0:blocks.1"] == plan.choices["0:blocks.1"]


def test_what_is_no_plan_is_refused():
    with pytest.raises(
        fxrl.errors.ConfigError, match=r"plan is a dict; optimize needs a fxrl\.Plan"
    ):
        fxrl.optimize(make_stack(1), square_loss, plan={})


def test_inputs_keep_less_than_products():
    kept, batch = {}, fixed(ids_batch(8, 64))
    for cut in ("products", "inputs"):
        model = make_stack(3)
        eager = saved_bytes(lambda model=model: square_loss(model, batch))
        plan = Plan({f"0:blocks.{i}": CutLayer(cut) for i in range(3)})
        step = fxrl.optimize(model, square_loss, fxrl.Config(**OPTIONS), plan=plan)
        step(batch)
        kept[cut] = saved_bytes(lambda step=step: step(batch))
        told = sum(r.saved_bytes for r in step.report.remarks if r.pass_name == "recompute")
        assert told == pytest.approx(eager - kept[cut], rel=0.15)
    assert kept["inputs"] < 0.8 * kept["products"]


class Normed(Block):
    """Its running statistics are written by one op, and read by another ahead of their update."""

    def __init__(self, width=8, **options):
        super().__init__(width, **options)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("seen", torch.ones(width))
        self.shift = nn.Parameter(torch.rand(width))

    def forward(self, x):
        flat = F.batch_norm(x.flatten(0, 1), self.mean, self.var, self.norm, training=True)
        x = super().forward(flat.view_as(x)) * self.seen + self.shift
        with torch.no_grad():
            self.shift.mul_(0.5)
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 1))
        return x


def decayed_loss(model, batch):
    with torch.no_grad():
        for block in model.blocks:
            block.shift.mul_(0.9)
    return square_loss(model, batch)


class InPlace(Block):
    """What it has made, a view of that, and its argument's copy."""

    def forward(self, x):
        made = super().forward(x)
        made[..., :3].zero_()
        made.mul_(0.5).sigmoid_()
        x = x + 0
        x += made
        return x


class Given(Block):
    """Its parameters: clamped under no_grad, scaled by other data, renormed by a look-up."""

    def __init__(self, width=8, **options):
        super().__init__(width, **options)
        self.shift = nn.Parameter(torch.rand(width))
        self.places = nn.Embedding(5, width, max_norm=0.7)

    def forward(self, x):
        with torch.no_grad():
            self.down.weight.clamp_(-0.2, 0.2)
        self.up.weight.data = self.up.weight.data * 0.9
        places = torch.arange(x.shape[1], device=x.device) % 5
        return super().forward(x) + self.places(places) * self.shift


class Fresh(Block):
    """Into zeros that nobody else reads."""

    def __init__(self, width=8, **options):
        super().__init__(width, **options)
        self.shift = nn.Parameter(torch.rand(width))

    def forward(self, x):
        out = torch.zeros_like(x).detach()
        out[:, 1:] = super().forward(x)[:, 1:]
        return x * self.shift + out


@pytest.mark.parametrize("kind", rows([Normed, InPlace, Given, Fresh], [Normed, InPlace, Given]))
def test_a_layer_that_writes_runs_again_with_what_it_read(kind):
    models = make_stack(4, block=kind), make_stack(4, block=kind)
    models[1].load_state_dict(models[0].state_dict())
    loss = decayed_loss if hasattr(models[0].blocks[0], "shift") else square_loss
    cuts = enumerate(("inputs", "products", "attention", "fewest"))
    plan = Plan({f"0:blocks.{i}": CutLayer(cut, "host", "host") for i, cut in cuts})
    step = fxrl.optimize(models[0], loss, fxrl.Config(**WRITING), plan=plan)
    for seed in range(3):
        torch.manual_seed(seed)
        batch = ids_batch(2, 5 + seed)
        step(batch).backward()
        loss(models[1], batch).backward()
    for named in ("state_dict", "named_parameters"):
        got, wanted = (dict(getattr(model, named)()) for model in models)
        torch.testing.assert_close(got, wanted)
    assert_same(*(gradients(model) for model in models))
    assert not any(buffer.requires_grad for buffer in models[0].buffers())
    moved = [r.reason for r in step.report.of_kind("applied") if r.pass_name == "offload"]
    assert len(moved) == 4


# ---------------------------------------------------------------------------- the plan itself
def test_a_step_lists_a_choice_for_every_site():
    step = fxrl.optimize(make_stack(2), square_loss, fxrl.Config(**OPTIONS))
    assert "nothing is captured yet" in str(step.plan)
    step(ids_batch())
    assert_expected_inline(
        str(step.plan),
        """\
0:blocks.0-1: outline-layers
0:blocks.0-1: layer: matrix products are kept for the backward""",
    )
    assert_expected_inline(
        step.plan.text(40),
        """\
0:blocks.0-1: outline-layers
0:blocks.0-1: layer: matrix products are
    kept for the backward""",
    )
    assert Plan.from_json(step.plan.to_json()) == step.plan
    assert step.plan_for(ids_batch(3, 7)).choices == step.plan.choices


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            CutLayer("products", "host"),
            "layer: matrix products are kept for the backward; its input waits on the host",
        ),
        (
            CutLayer("fewest", "host", "host"),
            "layer: the fewest bytes that spare the matrix products are kept for the backward; "
            "its input and what is kept wait on the host",
        ),
        (
            CutLayer("inputs", tile_tokens=4096, head_groups=8),
            "layer: only inputs are kept for the backward; MLP in tiles of 4096 rows; "
            "attention in 8 groups of heads",
        ),
        (TileHead("chunk-vocab-region", 8), "chunk-vocab-region, in tiles of 8 rows"),
        (TileHead("chunk-vocab-region"), "chunk-vocab-region, in tiles of the default size"),
    ],
)
def test_choices_in_words(choice, said):
    assert describe(choice) == said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[]", "the plan has no version, so it is none"),
        ('{"version": 99}', "of version 99, and this fxrl reads 1"),
        ('{"version": 1, "choices": []}', "no table of sites"),
        ('{"version": 1, "choices": {"0:x": 3}}', "0:x: 3 is no choice"),
        ('{"version": 1, "choices": {"0:x": {"kind": "drop"}}}', "keep, rewrite, head, layer"),
        (
            '{"version": 1, "choices": {"0:x": {"kind": "layer", "kept": "all"}}}',
            "kept='all' is not one of 'inputs'",
        ),
        ('{"version": 1, "choices": {"0:x": {"kind": "layer", "keep": 1}}}', "keep is unknown"),
        ('{"version": 1, "choices": {"0:x": {"kind": "head"}}}', "by"),
        (
            '{"version": 1, "choices": {"0:x": {"kind": "head", "by": "y", "tile_tokens": -1}}}',
            "-1",
        ),
        ('{"version": 1, "step_seconds": "long", "choices": {}}', "step_seconds='long'"),
    ],
)
def test_a_damaged_plan_is_refused_with_its_site(text, reason):
    with pytest.raises(PlanError, match=re.escape(reason)):
        Plan.from_json(text)
