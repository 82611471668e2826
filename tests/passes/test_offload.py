"""``offload``: what the plan lets wait on the host.

That it comes back bit for bit with every cut: ``test_recompute_numbers``.
"""

import re

import pytest
import torch
from expecttest import assert_expected_inline

import fxrl
from fxrl.ir.plan import CutLayer, Keep, Plan, TileHead
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls
from fxrl.passes.offload import Offload
from fxrl.passes.outline_layers import OutlineLayers
from tests.capture.mixer import assert_matches_eager
from tests.passes.layered import ids_batch, make_stack, outlined, square_loss
from tests.passes.lowered import lowered, plain

HOST = CutLayer("inputs", "host")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def calls(gm):
    """The calls of layers, without their weights and hashes."""
    text = re.sub(r", %model[^],]+|'[0-9a-f]{16}', ", "", print_graph(gm))
    return "\n".join(line for line in text.splitlines() if "fxrl.region" in line)


def test_applied():
    gm = outlined()
    assert_expected_inline(
        calls(gm),
        """\
%region_default = fxrl.region.default([%embedding], 0, []) : (f64[2, 5, 8])
%region_default_1 = fxrl.region.default([%getitem], 0, []) : (f64[2, 5, 8])""",
    )
    plan = Plan({"0:blocks.0": HOST, "0:blocks.1": CutLayer("products", "host", "host")})
    report = Offload().run(gm, plan)
    assert_expected_inline(
        calls(gm),
        """\
%region_default = fxrl.region.default([%embedding], 0, [0]) : (f64[2, 5, 8])
%region_default_1 = fxrl.region.default([%getitem], 0, [0, -1]) : (f64[2, 5, 8])""",
    )
    assert_expected_inline(
        plain(report),
        """\
applied: offload @ 0:blocks.0: its input waits on the host (saves 640 B)
applied: offload @ 0:blocks.1: its input and what is kept wait on the host (saves 6.875 KiB)""",
    )


def test_nothing_is_asked_for():
    gm = outlined()
    before = print_graph(gm)
    assert Offload().run(gm).remarks == ()
    assert print_graph(gm) == before


def twice_read(model, batch):
    """The first layer's input is a term of the loss, too."""
    x = model.embed(batch["ids"])
    y = x
    for block in model.blocks:
        y = block(y)
    return (x.sin() + y).square().mean()


def read_by_the_loss():
    model = make_stack(1)
    gm = lowered(lambda b: twice_read(model, b), ids_batch())
    OutlineLayers().run(gm)
    return gm


@pytest.mark.parametrize(
    ("make", "choice", "reason"),
    [
        (
            lambda: outlined(1, checkpointed=True),
            HOST,
            "the user's checkpointing of this layer runs it as a whole",
        ),
        (read_by_the_loss, HOST, "its input stays on the GPU: it is read outside of this layer"),
        (lambda: outlined(1), TileHead("offload", 4), "is for another site"),
        (lambda: outlined(1), Keep("as it is"), "as it is"),
    ],
    ids=["checkpointed", "read elsewhere", "another site", "kept"],
)
def test_missed(make, choice, reason):
    gm = make()
    before = print_graph(gm)
    (remark,) = Offload().run(gm, Plan({"0:blocks.0": choice})).remarks
    assert remark.kind == "missed"
    assert reason in remark.reason
    assert print_graph(gm) == before


def beside_reference(model, batch):
    """The model as it is now, and with gradients."""
    with torch.no_grad():
        reference = model(batch["ids"])
    return (model(batch["ids"]) - 0.5 * reference).square().mean()


@pytest.mark.parametrize("loss", [square_loss, twice_read, beside_reference])
def test_numerics_and_gradients(loss):
    model = make_stack(2)
    plan = Plan({f"0:blocks.{i}": CutLayer("attention", "host", "host") for i in range(2)})
    config = fxrl.Config(passes=("offload",), compile_regions=False, on_miss="error")
    step = fxrl.optimize(model, loss, config, plan=plan)
    for shape in ((2, 5), (1, 4)):
        assert_matches_eager(step, loss, model, ids_batch(*shape), tol=1e-12)
    asked = [call.args[3] != [] for call in region_calls(step.captures[0].rewritten.gm)]
    without = [False] * 2 if loss is beside_reference else []
    assert asked == [*without, True, True], "nothing of a forward without gradients waits"
