"""``recompute`` at run time: float64 numbers and gradients of eager, what is kept, what is shown."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import fxrl
from fxrl.ir.plan import CutLayer, Plan, in_segment
from tests.capture.mixer import assert_matches_eager, fixed, outcome
from tests.compile.region_cases import saved_bytes
from tests.passes.layered import Block, ids_batch, make_stack, square_loss
from tests.rows import rows

ONLY = fxrl.Config(passes=("recompute",), compile_regions=False, on_miss="error")
HOST = fxrl.Config(passes=("offload",), compile_regions=False, on_miss="error")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("checkpointed", [False, True], ids=["keep", "recompute"])
def test_numerics_and_gradients(checkpointed):
    model = make_stack(3, checkpointed=checkpointed)
    step = fxrl.optimize(model, square_loss, ONLY)
    for shape in ((2, 5), (3, 7), (4, 9)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    (capture,) = step.captures
    assert [site for site in step.plan.choices if "/" not in site and "-" not in site] == [
        f"0:blocks.{i}" for i in range(3)
    ]
    assert len(capture.kernels) == 1
    for kernels in capture.kernels.values():
        assert len(kernels.variants) == 1, "one body for every shape"


CUTS = ("products", "fewest", "attention", "inputs")
#: Seventeen layers, in which every cut stands behind every one, itself included.
WALK = [CUTS[i] for i in (0, 0, 1, 1, 2, 2, 3, 3, 0, 2, 0, 3, 1, 3, 2, 1, 0)]


@pytest.mark.parametrize(
    "checkpointed",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["open", "checkpointed"],
)
def test_any_choice_for_any_layer_has_eagers_numbers(checkpointed):
    """Also that it keeps what it says: attention runs twice only where inputs alone are kept."""
    assert {*itertools.pairwise(WALK)} == {*itertools.product(CUTS, repeat=2)}
    model = make_stack(len(WALK), checkpointed=checkpointed)
    plan = Plan({f"0:blocks.{i}": CutLayer(cut) for i, cut in enumerate(WALK)})
    step = fxrl.optimize(model, square_loss, ONLY, plan=plan)
    for shape in ((2, 5), (3, 7)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    assert [step.plan.choices[f"0:blocks.{i}"].kept for i in range(len(WALK))] == WALK
    bodies = step.captures[0].kernels.values()
    assert {kernels.region.cut for kernels in bodies} == {*CUTS}
    for kernels in bodies:
        again = str(kernels.traced.graphs[1].graph).count("flash_attention_for_cpu.default")
        assert again == (kernels.region.cut == "inputs")


#: Of layers in segments of three, and how often each attention runs then: what is kept, where the
#: first one's input waits, where the rest, rows per tile, groups of heads.
SEGMENTED = {
    "attention kept": (CutLayer("attention"), 1),
    "attention on the host": (CutLayer("attention", "host", "host"), 1),
    "attention made again": (CutLayer("attention", "gpu", "again"), 2),
    "tiles": (CutLayer("attention", "host", "again", 2), 2),
    "groups of heads": (CutLayer("attention", "host", "again", 2, 2), None),
    "groups of heads, kept": (CutLayer("attention", "host", "host", 2, 2), None),
    "products": (CutLayer("products"), 1),
    "the fewest bytes on the host": (CutLayer("fewest", "gpu", "host"), 1),
    "products made again": (CutLayer("products", "host", "again"), 2),
    "inputs": (CutLayer("inputs", "host"), None),
}
LAYERS = 7


def segments_of(way, count=3):
    """``way`` for layers in segments, as the planner has it."""
    last = [(i + 1) % count == 0 or i + 1 == LAYERS for i in range(LAYERS)]
    choices = [in_segment(way, first=i % count == 0, last=last[i]) for i in range(LAYERS)]
    return Plan({f"0:blocks.{i}": choice for i, choice in enumerate(choices)})


def attention_runs(work):
    """How often attention's forward runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
    names = [event.name for event in found.events()]
    return names.count("aten::_scaled_dot_product_flash_attention_for_cpu")


@pytest.mark.parametrize(
    "name", rows(SEGMENTED, ["attention on the host", "attention made again", "groups of heads"])
)
def test_segments_have_eagers_numbers(name, tmp_path):
    """Also that a segment runs again once: attention twice at most, and once where it is kept."""
    way, runs = SEGMENTED[name]
    model, passes = make_stack(LAYERS), ("recompute", "offload", "tile-tokens", "group-heads")
    config = replace(ONLY, passes=passes)
    step = fxrl.optimize(model, square_loss, config, plan=segments_of(way))
    for shape in ((2, 5), (3, 7)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    batch = ids_batch(3, 7)
    if runs:
        assert attention_runs(lambda: step(batch).backward()) == runs * LAYERS
    # a second backward makes all of it again
    model.zero_grad(set_to_none=True)
    loss = step(batch)
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in model.named_parameters())
    assert step.verify(ids_batch(3, 7)).ok
    step.dump(tmp_path)  # through AOTAutograd, at sizes that vary
    assert "region" in (tmp_path / "capture_0/aot/backward.py").read_text()


def test_a_segment_keeps_its_first_input():
    batch, kept = fixed(ids_batch(4, 32)), {}
    for way in (CutLayer("inputs"), CutLayer("attention", "gpu", "again"), CutLayer("attention")):
        model = make_stack(LAYERS)
        for count in (1, 3):
            plan = segments_of(way, count)
            step = fxrl.optimize(model, square_loss, ONLY, plan=plan)
            step(batch)
            kept[way.kept, way.kept_on, count] = activations(model, step, batch)
    inputs, again = 4 * 32 * 8 * 8, 4  # of 7 layers 3 begin a segment
    for way in (("inputs", "gpu"), ("attention", "gpu")):
        assert kept[*way, 3] == kept[*way, 1] - again * inputs
    assert kept["attention", "again", 3] == kept["inputs", "gpu", 3]


class Bounded(Block):
    """Its backward reads what it returns."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize("kept", ["products", "attention"])
def test_what_a_backward_reads_of_its_own_outputs_is_made_again_too(kept):
    model = make_stack(LAYERS, block=Bounded)
    plan = segments_of(CutLayer(kept, "gpu", "again"))
    step = fxrl.optimize(model, square_loss, ONLY, plan=plan)
    assert_matches_eager(step, square_loss, model, ids_batch(2, 5), tol=1e-12)


class Pair(Block):
    """Takes and returns two values, as layers do that add up their residuals later."""

    def forward(self, x, rest):
        made = super().forward(x + rest)
        return made * 0.5, made - x


def pairs_loss(model, batch):
    x = model.embed(batch["ids"])
    rest = x.cos()
    for block in model.blocks:
        x, rest = block(x, rest)
    return (x + rest).square().mean()


def test_several_inputs_of_one_maker_are_made_at_once():
    model, batch = make_stack(LAYERS, block=Pair), ids_batch(3, 7)
    plan = segments_of(CutLayer("attention", "gpu", "again"))
    step = fxrl.optimize(model, pairs_loss, ONLY, plan=plan)
    assert_matches_eager(step, pairs_loss, model, batch, tol=1e-12)
    assert attention_runs(lambda: step(batch).backward()) == 2 * LAYERS


def test_layers_that_run_in_turns():
    """Each is behind itself, too: the first one's input is made by none in its first round."""

    def loss(model, batch):
        x = model.embed(batch["ids"])
        for _ in range(2):
            for block in model.blocks:
                x = block(x)
        return x.square().mean()

    plan = Plan({f"0:blocks.{i}": CutLayer("attention", "again") for i in range(3)})
    step = fxrl.optimize(make_stack(3), loss, replace(ONLY, on_miss="ignore"), plan=plan)
    assert_matches_eager(step, loss, step.model, ids_batch(2, 5), tol=1e-12)
    assert [r.site for r in step.report.of_kind("missed")] == ["0:blocks.0"]
    regions = [kernels.region for kernels in step.captures[0].kernels.values()]
    assert {region.cut for region in regions} == {"attention"}, "also where its input waits"


def test_a_write_between_two_backwards_is_found():
    model = make_stack(LAYERS)
    step = fxrl.optimize(model, square_loss, ONLY, plan=segments_of(CutLayer("attention")))
    loss = step(fixed(ids_batch(2, 5)))
    last, first = (model.blocks[i].up.weight for i in (5, 4))
    torch.autograd.grad(loss, last, retain_graph=True)
    with torch.no_grad():
        first.mul_(2)
    with pytest.raises(RuntimeError, match="in place"):
        loss.backward()


def test_layers_that_cannot_make_the_next_ones_input_say_so():
    """The first has none before it, and the loss reads what the third one gets."""

    def loss(model, batch):
        x = model.embed(batch["ids"])
        inputs = []
        for block in model.blocks:
            inputs.append(x)
            x = block(x)
        return (x + inputs[2].sin()).square().mean()

    plan = Plan({f"0:blocks.{i}": CutLayer("inputs", "again") for i in range(3)})
    step = fxrl.optimize(make_stack(3), loss, replace(ONLY, on_miss="ignore"), plan=plan)
    assert_matches_eager(step, loss, step.model, ids_batch(2, 5), tol=1e-12)
    missed = {r.site: r.reason for r in step.report.of_kind("missed")}
    assert [*missed] == ["0:blocks.0", "0:blocks.2"]
    assert all("the layer before does not make it" in reason for reason in missed.values())


def held_in(cut, places):
    """Loss, gradients and kept bytes of three such layers, and what was moved."""
    model, batch = make_stack(3), fixed(ids_batch(4, 32))
    plan = Plan({f"0:blocks.{i}": CutLayer(cut, *there) for i, there in enumerate(places)})
    step = fxrl.optimize(model, square_loss, HOST, plan=plan)
    loss, grads = outcome(step, model, batch)
    moved = [r.reason for r in step.report.of_kind("applied") if r.pass_name == "offload"]
    return loss, grads, activations(model, step, batch), moved


@functools.cache
def on_gpu(cut):
    return held_in(cut, [("gpu", "gpu")] * 3)


@pytest.mark.parametrize("cut", rows(CUTS, ["products", "attention", "fewest"]))
def test_what_waits_on_the_host_comes_back_bit_for_bit(cut):
    """Of three layers one has its inputs there, one the rest, one both."""
    loss, grads, size, moved = on_gpu(cut)
    places = [("gpu", "host"), ("host", "gpu"), ("host", "host")]
    its_loss, its_grads, its_size, its_moved = held_in(cut, places)
    assert torch.equal(loss, its_loss)
    assert all(torch.equal(grads[name], its_grads[name]) for name in grads)
    inputs, rest = 4 * 32 * 8 * 8, (size - on_gpu("inputs")[2]) // 3
    assert its_size == size - 2 * inputs - 2 * rest
    assert (len(moved), len(its_moved)) == (0, 3)


def test_the_more_is_kept_the_more_is_kept():
    sizes = [on_gpu(cut)[2] for cut in CUTS]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]
    # attention: the output, of the layer's width, and a log-sum-exp per head, both of 8 bytes
    assert sizes[2] - sizes[3] == 3 * 4 * 32 * (8 + 2) * 8


def weighted(outputs, mask):
    return (outputs.square().mean(-1) * mask).sum() / mask.sum()


#: What the loss and the batch look like -> loss, and fields as (name, what T adds up to).
LAYOUTS = {
    "ids T, mask T-1": (lambda m, b: weighted(m(b["ids"])[:, :-1], b["mask"]), {"ids": 0, "mask": -1}),
    "mask T-1, ids T": (lambda m, b: weighted(m(b["ids"])[:, 1:], b["mask"]), {"mask": -1, "ids": 0}),
    "ids T+1, mask T": (lambda m, b: weighted(m(b["ids"][:, :-1]), b["mask"]), {"mask": 0, "ids": 1}),
    "prompt and completion": (
        lambda m, b: weighted(m(torch.cat([b["prompt"], b["ids"]], 1))[:, -b["ids"].shape[1]:], b["mask"]),
        {"prompt": -2, "ids": 0, "mask": 0},
    ),
    "halves": (
        lambda m, b: weighted(m(b["ids"])[:, : b["ids"].shape[1] // 2], b["mask"]),
        {"ids": "2T", "mask": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", rows(LAYOUTS, ["mask T-1, ids T", "ids T, mask T-1", "ids T+1, mask T", "halves"])
)
def test_layers_of_any_batch_layout(name):
    """Sizes such as ``T - 1`` may be the only ones in the batch that are plain symbols."""
    loss, fields = LAYOUTS[name]
    model = make_stack(2, checkpointed=[False, True])
    step = fxrl.optimize(model, loss, ONLY)
    for count, length in ((3, 6), (2, 9), (4, 3)):
        batch = {}
        for index, (field, more) in enumerate(fields.items()):
            width = 2 * length if more == "2T" else length + more
            batch[field] = ids_batch(count, width, seed=index)["ids"]
            if field == "mask":
                batch[field] = batch[field] / 11 + 0.5
        assert_matches_eager(step, loss, model, batch, tol=1e-12)
    assert [len(capture.kernels) for capture in step.captures] == [2] * len(step.captures)


def test_one_row_and_then_many():
    model = make_stack(2)
    step = fxrl.optimize(model, square_loss, ONLY)
    for shape in ((1, 4), (3, 4), (1, 6), (2, 1)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)


def test_frozen_weights_and_embeddings_share_bodies_and_get_no_gradient():
    model = make_stack(4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name)
    step = fxrl.optimize(model, square_loss, ONLY)
    assert_matches_eager(step, square_loss, model, fixed(ids_batch()), tol=1e-12)
    assert len(step.captures[0].kernels) == 1


@pytest.mark.parametrize(
    "checkpointed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["keep", "recompute"]
)
def test_dropout_draws_what_eager_draws(checkpointed):
    model = make_stack(2, dropout=0.5, checkpointed=checkpointed)
    step = fxrl.optimize(model, square_loss, ONLY)
    batch = fixed(ids_batch(3, 7))
    results = []
    for function in (step, lambda b: square_loss(model, b)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        function(batch).backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, found in results[0].items():
        torch.testing.assert_close(found, results[1][name], rtol=1e-12, atol=1e-14, msg=name)
    assert any(r.kind == "applied" for r in step.report.remarks)


def test_scoring_without_grad():
    model = make_stack(2)
    step = fxrl.optimize(model, square_loss, ONLY)
    with torch.no_grad():
        torch.testing.assert_close(step(fixed(ids_batch())), square_loss(model, fixed(ids_batch())))
    assert len(step.captures[0].kernels) == 1


def test_autocast_inside_a_checkpointed_body():
    model = make_stack(2, checkpointed=True).float()
    step = fxrl.optimize(model, square_loss, ONLY)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = step(fixed(ids_batch())), square_loss(model, fixed(ids_batch()))
    got.backward()
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)
    exact = square_loss(model, fixed(ids_batch()))
    assert got != exact, "the body ran in bf16"


# ---------------------------------------------------------------------------- memory
def eager_of(model):
    return lambda batch: square_loss(model, batch)


def activations(model, function, batch):
    """Bytes that autograd keeps besides the parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return saved_bytes(lambda: function(batch), without=weights)


def test_keep_saves_less_than_eager_does():
    model = make_stack(3)
    step = fxrl.optimize(model, square_loss, ONLY)
    batch = fixed(ids_batch(4, 32))
    step(batch)
    assert activations(model, step, batch) < activations(model, eager_of(model), batch)


def test_recompute_keeps_the_layers_inputs():
    eager, model = make_stack(3), make_stack(3, checkpointed=True)
    step = fxrl.optimize(model, square_loss, ONLY)
    batch = fixed(ids_batch(4, 32))
    step(batch)
    assert activations(model, step, batch) <= activations(model, eager_of(model), batch)
    assert activations(model, step, batch) < 0.5 * activations(eager, eager_of(eager), batch)


# ---------------------------------------------------------------------------- shown
def test_dump_and_verify_show_the_layers(tmp_path):
    model = make_stack(2)
    step = fxrl.optimize(model, square_loss, ONLY)
    step(ids_batch())
    text = step.dump(tmp_path).read_text()
    assert "recompute" in text
    assert len(list(tmp_path.glob("capture_0/regions/*/vjp.txt"))) == 1
    assert (tmp_path / "capture_0/aot/backward.py").read_text().count("region_vjp.default(") == 2
    step.verify(ids_batch()).raise_if_failed()
