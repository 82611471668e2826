"""Layer regions on a GPU: the kernel that runs attention, every cut's numbers, offload's bits."""

import itertools

import pytest
import torch

import fxrl
from fxrl.ir.plan import CutLayer, Plan, in_segment
from tests.capture.mixer import outcome
from tests.passes.layered import ids_batch, make_stack, square_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYERS, LENGTHS = 3, (200, 64, 513)
CUTS = ("products", "fewest", "attention", "inputs")
PLACES = tuple(itertools.product(("gpu", "host"), repeat=2))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.backends.cuda.enable_cudnn_sdp(True)  # which an import of vLLM switches off


@pytest.fixture(params=[False, True], ids=["open", "checkpointed"])
def model(request):
    stack = make_stack(LAYERS, width=128, heads=2, checkpointed=request.param)
    return stack.to(device="cuda", dtype=torch.bfloat16)


def batch_of(length):
    return {"ids": ids_batch(2, length)["ids"].cuda()}


def planned(model, cut, inputs_on="gpu", kept_on="gpu"):
    return by_choice(model, [CutLayer(cut, inputs_on, kept_on)] * LAYERS)


def by_choice(model, choices):
    plan = Plan({f"0:blocks.{i}": choice for i, choice in enumerate(choices)})
    config = fxrl.Config(passes=("offload",), on_miss="error")
    return fxrl.optimize(model, square_loss, config, plan=plan)


def distance(found, true):
    """Of all gradients at once, relative."""
    off = torch.stack([(found[name].double() - g).norm() for name, g in true.items()]).norm()
    return off / torch.stack([g.norm() for g in true.values()]).norm()


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_are_as_near_to_fp32_as_eagers(model, cut):
    """No further than eager bf16, with a fifth for the other order of sums."""
    step = planned(model, cut)
    exact = make_stack(LAYERS, width=128, heads=2).to("cuda")
    exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    for length in LENGTHS:
        batch = batch_of(length)
        _, true = outcome(lambda b: square_loss(exact, b), exact, batch)
        _, eager = outcome(lambda b: square_loss(model, b), model, batch)
        _, ours = outcome(step, model, batch)
        assert distance(ours, true) <= 1.2 * distance(eager, true)


@pytest.mark.parametrize("kept_on", ["gpu", "host", "again"])
@pytest.mark.parametrize("inputs_on", ["gpu", "host"])
def test_a_segment_has_the_numbers_of_layers_that_keep_their_inputs(model, inputs_on, kept_on):
    """Bit for bit where its forward runs again; what makes outputs of attention's result is
    compiled by itself, and may round otherwise."""
    way = CutLayer("attention", inputs_on, kept_on)
    segment = [in_segment(way, first=i == 0, last=i == LAYERS - 1) for i in range(LAYERS)]
    apart = by_choice(model, [CutLayer(choice.kept) for choice in segment])
    step = by_choice(model, segment)
    for length in (*LENGTHS, LENGTHS[0]):
        loss, grads = outcome(apart, model, batch_of(length))
        its_loss, its_grads = outcome(step, model, batch_of(length))
        assert torch.equal(loss, its_loss)
        assert distance(its_grads, grads) <= (0 if kept_on == "again" else 0.01)


def test_hopper_takes_cudnn(model):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs an sm_90 GPU")
    step = planned(model, "attention")
    outcome(step, model, batch_of(200))
    assert any(r.reason == "attention: cuDNN attention" for r in step.report.remarks)


@pytest.mark.parametrize("cut", CUTS)
def test_offload_is_exact_at_every_length(model, cut):
    steps = {places: planned(model, cut, *places) for places in PLACES}
    for length in (*LENGTHS, LENGTHS[0]):
        found = {places: outcome(step, model, batch_of(length)) for places, step in steps.items()}
        loss, grads = found["gpu", "gpu"]
        for its_loss, its_grads in found.values():
            assert torch.equal(loss, its_loss)
            assert all(torch.equal(grads[name], its_grads[name]) for name in grads)
