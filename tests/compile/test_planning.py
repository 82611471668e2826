"""Plans for real steps: obeyed, predicted, refused with the reason."""

import functools
import json
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxrl
from fxrl import losses
from fxrl.compile.backend import Backend
from fxrl.errors import PlanError
from fxrl.ir.plan import CutHead, CutLayer, Plan
from fxrl.models import lora, tiny_config
from fxrl.planner.target import TARGETS
from fxrl.step import TrainStep
from tests.capture.mixer import assert_matches_eager, fixed
from tests.passes.layered import make_stack, square_loss
from tests.planner.test_memory_profile import most_allocated

PASSES = ("recompute", "offload", "tile-tokens", "group-heads")
MiB = 2**20
DEPTH = 4  # layers of the models here


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def config(**options):
    return fxrl.Config(
        passes=PASSES, compile_regions=False, on_miss="error", **{"host_memory": "1GiB"} | options
    )


def wide_stack(device="cpu"):
    """Layers whose activations are what memory goes to."""
    with torch.device(device):
        return make_stack(DEPTH, width=64, heads=4)


def batch(tokens, rows=2, device="cpu"):
    return {"ids": torch.zeros(rows, tokens, dtype=torch.long, device=device)}


@functools.cache
def planned(tokens=3072, **options):
    step = fxrl.optimize(wide_stack("meta"), square_loss, config(**options))
    return step.plan_for(batch(tokens))


def cuts(plan):
    return [choice for choice in plan.choices.values() if isinstance(choice, CutLayer)]


def test_where_everything_may_stay_products_are_kept():
    plan = planned()
    assert {choice.kept for choice in cuts(plan)} == {"products"}
    assert plan.peak_host_bytes == 0
    assert plan.peak_gpu_bytes == max(moment.bytes for moment in plan.timeline)
    turns = [*["forward"] * DEPTH, "head", *["backward"] * DEPTH, "end"]
    assert [m.phase for m in plan.timeline] == turns
    assert plan.step_seconds > 0
    assert Plan.from_json(plan.to_json()) == plan


def test_a_budget_is_kept_and_more_of_it_is_never_slower():
    free = planned()
    seconds = []
    for share in (0.6, 1.1):
        budget = int(share * free.peak_gpu_bytes)
        plan = planned(gpu_memory=budget)
        assert plan.peak_gpu_bytes <= budget
        seconds.append(plan.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == free.step_seconds


def test_heads_run_in_groups_only_where_nothing_else_fits():
    free = planned(12288)
    roomy, tight = (planned(12288, gpu_memory=int(s * free.peak_gpu_bytes)) for s in (0.5, 0.25))
    assert {choice.head_groups for choice in cuts(roomy)} == {0}
    assert 4 in {choice.head_groups for choice in cuts(tight)}, "each of the four heads by itself"
    assert tight.peak_gpu_bytes <= 0.25 * free.peak_gpu_bytes
    assert tight.step_seconds > roomy.step_seconds
    smallest = {f"0:blocks.{i}": CutLayer("inputs", "host", tile_tokens=6144) for i in range(DEPTH)}
    step = fxrl.optimize(
        wide_stack("meta"),
        square_loss,
        config(gpu_memory=int(0.25 * free.peak_gpu_bytes)),
        plan=Plan(smallest),
    )
    with pytest.raises(PlanError, match="no plan fits"):
        step.plan_for(batch(12288))


def small_steps(device, **options):
    """Layers too small to pay, by the passes' options."""
    small = {"outline-layers": {"least_hidden": {device: 2**30}}}
    options |= {"passes": ("outline-layers", *PASSES), "pass_options": small}
    return replace(config(), **options)


@pytest.mark.slow  # as when a batch is longer, below
def test_small_layers_become_regions_where_no_plan_fits_them_op_by_op():
    model = wide_stack("meta")
    free = fxrl.optimize(model, square_loss, small_steps("meta")).plan_for(batch(3072))
    assert not cuts(free)
    step = fxrl.optimize(
        model, square_loss, small_steps("meta", gpu_memory=free.peak_gpu_bytes // 2)
    )
    plan = step.plan_for(batch(3072))
    assert len(cuts(plan)) == DEPTH
    assert plan.peak_gpu_bytes <= free.peak_gpu_bytes // 2


def test_small_layers_become_regions_when_a_batch_is_longer():
    """The first batches fit op by op; what runs for the long one then serves short ones, too."""
    given = small_steps("cpu", gpu_memory="110MiB")
    model = wide_stack()
    step = TrainStep(
        model, square_loss, given, backend=Backend(given, Plan(), always_rewritten=True)
    )
    for tokens, count in ((32, 0), (48, 0), (1536, DEPTH), (40, DEPTH)):
        ids = {"ids": torch.randint(0, 11, (2, tokens))}
        assert_matches_eager(step, square_loss, model, ids)
        assert len(cuts(step.plan)) == count, tokens


def test_without_host_memory_nothing_goes_there():
    free = planned()
    plan = planned(gpu_memory=int(0.8 * free.peak_gpu_bytes), host_memory=0)
    assert plan.peak_host_bytes == 0
    assert {choice.inputs_on for choice in cuts(plan)} == {"gpu"}


def two_forwards(model, batch):
    one, other = (model(batch[name]).square().mean() for name in ("ids", "other"))
    return (one - other).sigmoid()


def test_what_a_first_forward_keeps_waits_beside_the_second():
    model, sizes = wide_stack("meta"), batch(1024) | {"other": batch(512)["ids"]}
    free = stepped(model, two_forwards, gpu_memory="1GiB").plan_for(sizes)
    phases = [*["forward"] * DEPTH, "between", *["forward"] * DEPTH]
    back = [phase.replace("forward", "backward") for phase in reversed(phases)]
    assert [m.phase for m in free.timeline] == [*phases, "head", *back, "end"]
    numbers = [m.layer for m in free.timeline if m.phase != "between"]
    there = [*range(DEPTH)]
    assert numbers == [*there, *there, DEPTH, *reversed(there), *reversed(there), 0]
    kept = [m.parts["kept for the backward"] for m in free.timeline]
    half = kept[: len(phases) + 1]
    assert half == sorted(half)
    long, short = half[3] - half[2], half[-1] - half[-2]
    assert long == pytest.approx(2 * short, rel=0.01), "each forward by its own length"
    ends = [sum(m.parts.values()) for m in (free.timeline[0], free.timeline[-1])]
    assert max(ends) < free.peak_gpu_bytes
    # one choice for a layer in both, and whatever is on its way has room beside both
    away = Plan({f"0:blocks.{i}": CutLayer("fewest", "host", "host") for i in range(DEPTH)})
    budget = int(0.7 * free.peak_gpu_bytes)
    found = stepped(model, two_forwards, away, gpu_memory=budget).plan_for(sizes)
    assert found.peak_gpu_bytes <= budget
    assert found.peak_host_bytes > 0
    assert [c.sending is not None for c in cuts(found)] == [True] * DEPTH


def beside_reference(model, batch):
    with torch.no_grad():
        reference = model(batch["other"]).square().mean()
    return (model(batch["ids"]).square().mean() - reference).sigmoid()


def test_a_forward_without_gradients_keeps_nothing():
    sizes = batch(1024) | {"other": batch(1024)["ids"]}
    away = Plan({f"0:blocks.{i}": CutLayer("fewest", "host", "host") for i in range(DEPTH)})
    alone, beside = (
        stepped(wide_stack("meta"), loss_fn, away, gpu_memory="1GiB").plan_for(sizes)
        for loss_fn in (square_loss, beside_reference)
    )
    assert beside.peak_host_bytes == alone.peak_host_bytes > 0
    assert beside.peak_gpu_bytes == pytest.approx(alone.peak_gpu_bytes, rel=0.02)
    ahead = [m for m in beside.timeline if m.phase == "forward"][:DEPTH]
    assert [m.parts["kept for the backward"] for m in ahead] == [0] * DEPTH


class LastNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_nor_does_the_norm_behind_its_layers():
    model, sizes = wide_stack("meta"), batch(1024) | {"other": batch(1024)["ids"]}
    model.head = nn.Sequential(OrderedDict(norm=LastNorm(), out=model.head))
    kept = []
    for loss_fn in (square_loss, beside_reference):
        plan = stepped(model, loss_fn, passes=(*PASSES, "outline-norms")).plan_for(sizes)
        assert any(site.startswith("0:head.norm/") for site in plan.choices)
        kept += [m.parts["kept for the backward"] for m in plan.timeline if m.phase == "head"]
    assert kept[1] == pytest.approx(kept[0], rel=1e-3)


def test_heads_of_both_forwards_keep_exponentials_beside_each_other():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3"))

    def loss_fn(model, batch):
        one, other = (
            F.cross_entropy(
                model(batch[name]).logits[:, :-1].flatten(0, 1), batch[name][:, 1:].flatten()
            )
            for name in ("ids", "other")
        )
        return (one - other).sigmoid()

    sizes = batch(1024) | {"other": batch(1024)["ids"]}
    options = {"min_saved_bytes": 0, "gpu_memory": "8GiB", "passes": None}
    options |= {"compile_regions": True, "pass_options": {"outline-layers": {"least_hidden": {}}}}
    found = stepped(model, loss_fn, **options).plan_for(sizes)
    heads = {s: c for s, c in found.choices.items() if isinstance(c, CutHead)}
    assert [head.kept for head in heads.values()] == ["exponentials"] * 2
    rows = Plan(dict.fromkeys(heads, CutHead("rows")))
    fewer = stepped(model, loss_fn, rows, **options).plan_for(sizes)
    kept = [
        next(m for m in plan.timeline if m.phase == "head").parts["kept for the backward"]
        for plan in (found, fewer)
    ]
    vocab = model.config.vocab_size
    assert kept[0] - kept[1] >= 2 * 1023 * vocab * model.dtype.itemsize, "of the first forward"


@pytest.mark.parametrize(
    ("loss_fn", "kept"),
    [
        (square_loss, "ppp"),
        (beside_reference, "ppp"),
        (beside_reference, "hhi"),
        (two_forwards, "iip"),
        pytest.param(square_loss, "iip", marks=pytest.mark.slow),
        pytest.param(two_forwards, "ppp", marks=pytest.mark.slow),
        (square_loss, "hhi"),
        pytest.param(two_forwards, "hhi", marks=pytest.mark.slow),
    ],
)
def test_a_step_allocates_what_its_plan_says(loss_fn, kept):
    """By the CPU allocator's count: bodies run op by op here, and attention has its own scratch."""
    torch.manual_seed(0)
    model = make_stack(3, width=64, heads=4)
    ids = fixed({name: torch.randint(0, 11, (2, 1024)) for name in ("ids", "other")})
    ways = {"p": CutLayer("products"), "i": CutLayer("inputs"), "a": CutLayer("attention")}
    ways["h"] = CutLayer("attention", "gpu", "again")
    segment = "h" in kept  # the first layer's input alone
    given = Plan(
        {
            f"0:blocks.{i}": replace(ways[one], inputs_on="again" if segment and i else "gpu")
            for i, one in enumerate(kept)
        }
    )
    step = stepped(model, loss_fn, given, gpu_memory="1GiB")

    def work():
        loss = step(ids)
        loss.backward()
        return loss

    work()
    model.zero_grad(set_to_none=True)
    moments = step.plan.timeline
    planned = max(m.bytes - m.parts["weights and states"] for m in moments)
    assert planned == pytest.approx(most_allocated(work), rel=0.08)


def test_two_forwards_run_as_planned():
    torch.manual_seed(0)
    model = wide_stack()
    ids = fixed({n: torch.randint(0, 11, (2, t)) for n, t in (("ids", 512), ("other", 256))})
    peak = stepped(model, two_forwards, gpu_memory="1GiB").plan_for(ids).peak_gpu_bytes
    step = stepped(model, two_forwards, gpu_memory=int(0.8 * peak))
    for _ in range(2):
        assert_matches_eager(step, two_forwards, model, ids, tol=1e-10)
    assert step.plan.peak_gpu_bytes <= 0.8 * peak
    assert {(c.kept, c.kept_on) for c in cuts(step.plan)} != {("products", "gpu")}


def test_what_does_not_fit_is_an_error_that_says_what_would():
    with pytest.raises(PlanError, match="no plan fits gpu_memory") as error:
        planned(tokens=2**16, gpu_memory="256MiB")
    text = str(error.value)
    assert "at least" in text
    longest = int(text.rpartition("; ")[2].split()[0])
    assert planned(tokens=longest, gpu_memory="256MiB").peak_gpu_bytes <= 256 * MiB
    with pytest.raises(PlanError):
        planned(tokens=int(1.05 * longest), gpu_memory="256MiB")


def test_one_token_that_predicts_none_is_a_length_too():
    """It is the last that is tried, and a trained head has no rows there."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))

    def loss_fn(model, batch):
        logps = model(batch["ids"])[:, :-1].log_softmax(-1)
        return -logps.gather(-1, batch["ids"][:, 1:, None]).mean()

    step = fxrl.optimize(model, loss_fn, fxrl.Config(min_saved_bytes=0, gpu_memory="4KiB"))
    with pytest.raises(PlanError, match="no length fits"):
        step.plan_for(batch(16))


def test_the_longest_context_is_one_that_fits():
    plan = planned(tokens=256, gpu_memory="256MiB")
    assert plan.max_context > 256
    assert planned(tokens=plan.max_context, gpu_memory="256MiB").peak_gpu_bytes <= 256 * MiB


@pytest.mark.parametrize("loss_fn", [square_loss, beside_reference])
def test_segments_reach_longer_contexts(loss_fn):
    with torch.device("meta"):
        model = make_stack(12, width=64, heads=4)

    def sizes(tokens):
        return batch(tokens) | {"other": batch(tokens)["ids"]}

    fewest = Plan({f"0:blocks.{i}": CutLayer("inputs", "gpu", "gpu", 4096, 4) for i in range(12)})
    budgets = {"gpu_memory": "192MiB", "host_memory": 0}
    apart = stepped(model, loss_fn, plan=fewest, **budgets).plan_for(sizes(512)).max_context
    step = stepped(model, loss_fn, **budgets)
    longest = step.plan_for(sizes(512)).max_context
    assert longest > 1.1 * apart
    found = step.plan_for(sizes(longest))
    assert found.peak_gpu_bytes <= 192 * MiB
    again = [choice.inputs_on == "again" for choice in cuts(found)]
    assert again[0] is False
    assert sum(again) >= 4
    assert Plan.from_json(found.to_json()) == found
    with pytest.raises(PlanError, match="no plan fits"):
        stepped(model, loss_fn, plan=fewest, **budgets).plan_for(sizes(longest))


def test_what_the_user_chose_stays():
    given = Plan({"0:blocks.2": CutLayer("inputs")})
    step = fxrl.optimize(wide_stack("meta"), square_loss, config(), plan=given)
    found = step.plan_for(batch(2048))
    assert [c.kept for c in cuts(found)] == ["products"] * 2 + ["inputs"] + ["products"]
    # also where it waits on the host; how long its copy may be on its way is the planner's
    given = Plan({"0:blocks.2": CutLayer("inputs", "host")})
    step = fxrl.optimize(wide_stack("meta"), square_loss, config(host_memory="16GiB"), plan=given)
    found = step.plan_for(batch(2048)).choices["0:blocks.2"]
    assert found == given.choices["0:blocks.2"]
    assert found.sending is not None


def stepped(model, loss_fn=square_loss, plan=None, **options):
    return fxrl.optimize(model, loss_fn, replace(config(), **options), plan=plan)


def test_no_pass_that_does_not_run_is_asked_for_anything():
    free = planned()
    budget = int(0.75 * free.peak_gpu_bytes)
    named = {"passes": ("recompute", "tile-tokens"), "gpu_memory": budget}
    found = stepped(wide_stack("meta"), **named).plan_for(batch(3072))
    assert {(c.inputs_on, c.kept_on, c.head_groups) for c in cuts(found)} == {("gpu", "gpu", 0)}
    assert {c.kept for c in cuts(found)} != {"products"}
    named["passes"] = ("outline-layers",)
    with pytest.raises(PlanError, match="no plan fits"):
        stepped(wide_stack("meta"), **named).plan_for(batch(3072))
    named["gpu_memory"] = 2 * free.peak_gpu_bytes
    given = Plan({"0:blocks.2": CutLayer("inputs", "host", tile_tokens=64)})
    found = stepped(wide_stack("meta"), plan=given, **named).plan_for(batch(3072))
    assert not cuts(found), "no pass cuts layers"
    assert found.peak_gpu_bytes == free.peak_gpu_bytes


def test_the_longest_context_of_choices_that_are_given():
    """Their host memory grows with it, too."""
    given = Plan({f"0:blocks.{i}": CutLayer("inputs", "host") for i in range(DEPTH)})
    step = stepped(wide_stack("meta"), plan=given, host_memory="96MiB")  # a page of 16 for each
    longest = step.plan_for(batch(256)).max_context
    assert longest > 256
    assert step.plan_for(batch(longest)).peak_host_bytes <= 96 * MiB
    with pytest.raises(PlanError, match="choices that are given"):
        step.plan_for(batch(int(1.05 * longest)))


def test_a_step_runs_as_planned():
    torch.manual_seed(0)
    model = wide_stack()
    ids = {"ids": torch.randint(0, 11, (2, 1536))}
    peak = fxrl.optimize(model, square_loss, config()).plan_for(ids).peak_gpu_bytes
    step = fxrl.optimize(model, square_loss, config(gpu_memory=int(0.7 * peak)))
    assert_matches_eager(step, square_loss, model, ids, tol=1e-10)
    plan = step.plan
    assert plan.peak_gpu_bytes <= 0.7 * peak
    assert cuts(plan) == cuts(step.plan_for(ids))
    assert {(choice.kept, choice.kept_on) for choice in cuts(plan)} != {("products", "gpu")}
    dumped = json.loads(plan.to_json())
    assert {"peak_gpu_bytes", "peak_host_bytes", "step_seconds", "max_context"} <= dumped.keys()


def test_a_longer_batch_gets_a_plan_of_its_own():
    torch.manual_seed(0)
    model = wide_stack()
    short, long = ({"ids": torch.randint(0, 11, (2, tokens))} for tokens in (64, 768))
    step = fxrl.optimize(model, square_loss, config())
    budget = int(0.8 * step.plan_for(long).peak_gpu_bytes)
    step = fxrl.optimize(model, square_loss, config(gpu_memory=budget))
    assert_matches_eager(step, square_loss, model, short, tol=1e-10)
    assert {choice.kept for choice in cuts(step.plan)} == {"products"}
    for again in (long, short, long):
        assert_matches_eager(step, square_loss, model, again, tol=1e-10)
        assert step.plan.peak_gpu_bytes <= budget
        assert {choice.kept for choice in cuts(step.plan)} != {"products"}
    told = [r.reason for r in step.report.remarks if r.pass_name == "plan"]
    assert len(told) == 1
    assert "768" in told[0]
    with pytest.raises(PlanError, match="no plan fits gpu_memory"):
        step({"ids": torch.randint(0, 11, (2, 2**16))})
    assert_matches_eager(step, square_loss, model, long, tol=1e-10)


@pytest.mark.slow  # as the command is asked in test_the_target_counts
def test_another_gpu_another_time():
    step = fxrl.optimize(wide_stack("meta"), square_loss, config())
    h200, a100 = (step.plan_for(batch(2**15), target=TARGETS[n]) for n in ("h200", "a100"))
    assert a100.step_seconds > h200.step_seconds
    assert a100.peak_gpu_bytes == h200.peak_gpu_bytes


@pytest.mark.slow  # as the one that was measured, in tests/planner/test_against_measurements.py
def test_a_mixture_of_experts_without_weights():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    shape = tiny_config("mixtral", layers=2, hidden=256, intermediate=512, experts=2)
    with torch.device("meta"):
        model = lora(transformers.AutoModelForCausalLM.from_config(shape), r=2)
    sizes = {"input_ids": (2, 2049), "completion_mask": (2, 2048), "old_logps": (2, 2048)}
    given = {name: torch.zeros(size, dtype=torch.long) for name, size in sizes.items()}
    step = fxrl.optimize(model, losses.grpo(beta=0.0), config())
    plan = step.plan_for(given | {"advantages": torch.zeros(2)}, target=TARGETS["h200"])
    assert len(cuts(plan)) == 2
    assert plan.step_seconds
    assert plan.max_context
    assert plan.max_context > 2049


def test_a_model_without_layers_has_predictions():
    linear = torch.nn.Linear(64, 8, device="meta")
    step = fxrl.optimize(linear, lambda model, b: model(b["x"]).square().mean())
    plan = step.plan_for({"x": torch.zeros(5, 64)})
    weights = 3 * 4 * (64 * 8 + 8)  # and AdamW's states
    assert plan.peak_gpu_bytes > weights
    assert [moment.phase for moment in plan.timeline] == ["head", "end"]


def test_attention_takes_the_pairs_that_a_mask_leaves():
    transformers = pytest.importorskip("transformers")
    shape = tiny_config("qwen3", layers=1, head_dim=128, positions=4096)
    shape.use_cache = False  # else transformers looks for no documents
    options = {"outline-layers": {"least_hidden": {}}, "factor-masks": {"least_mask": {}}}
    given = fxrl.Config(min_saved_bytes=0, gpu_memory="4GiB", pass_options=options)
    kept = Plan({"0:model.layers.0": CutLayer()})  # the one choice that is priced

    def seconds(device, documents):
        torch._dynamo.reset()
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(shape)
        sizes = {"completion_mask": (1, 4095), "old_logps": (1, 4095), "advantages": (1,)}
        rows = {name: torch.zeros(size) for name, size in sizes.items()}
        rows["input_ids"] = torch.zeros(1, 4096, dtype=torch.long)
        rows["position_ids"] = (torch.arange(4096) % (4096 // documents))[None]
        step = fxrl.optimize(model, losses.grpo(beta=0.0), given, plan=kept)
        return step.plan_for(fixed(rows), target=SLOW_ATTENTION).step_seconds

    packed, whole, unknown = seconds("cpu", 8), seconds("cpu", 1), seconds("meta", 8)
    # blocks of 128 that see something, 8 documents of 4 blocks: 80 of 32 x 32; one: 528
    assert packed / whole == pytest.approx(80 / 528, rel=0.05)
    assert unknown < whole  # of fakes the mask counts as causal, at the rate of one that is


SLOW_ATTENTION = replace(
    TARGETS["h200"], attention_flops=1e12, attention_backward_flops=1e12, start=0.0
)


# ---------------------------------------------------------------------------- micro-batches
def wide_weights():
    """Layers whose weights are what memory goes to."""
    torch.manual_seed(0)
    return make_stack(DEPTH, width=128, heads=4)


def of_micro_batches(step, model, ids, count):
    """The plans under which micro-batches ran, and the gradients."""
    plans = []
    for _ in range(count):
        step(ids).backward()
        plans.append(step.plan)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return plans, gradients


def test_gradients_of_another_micro_batch_count():
    model, ids = wide_weights(), fixed({"ids": torch.randint(0, 11, (2, 128))})
    weights = sum(p.nbytes for p in model.parameters())
    step = fxrl.optimize(model, square_loss, config(gpu_memory="1GiB"))
    alone, later = (step.plan_for(ids, accumulated=more) for more in (False, True))
    first, *_, end = zip(alone.timeline, later.timeline, strict=True)
    assert first[1].bytes - first[0].bytes == first[1].parts["gradients"] == weights
    assert end[0].parts["gradients"] == weights < end[1].parts["gradients"]
    # of plans that run it is what is there that counts, and the highest that is told
    found, _ = of_micro_batches(step, model, ids, 3)
    assert [plan.peak_gpu_bytes for plan in found] == [
        alone.peak_gpu_bytes,
        later.peak_gpu_bytes,
        later.peak_gpu_bytes,
    ]
    assert found[0].choices == found[1].choices
    step(ids).backward()
    assert step.plan_for(ids) == alone, "though the weights have gradients now"


def test_a_micro_batch_that_does_not_fit_beside_gradients_gets_a_plan_of_its_own():
    model, ids = wide_weights(), fixed({"ids": torch.randint(0, 11, (2, 512))})
    free = fxrl.optimize(model, square_loss, config(gpu_memory="1GiB"))
    budget = int(1.04 * free.plan_for(ids).peak_gpu_bytes)
    assert 0.97 * budget < free.plan_for(ids, accumulated=True).peak_gpu_bytes
    step = fxrl.optimize(model, square_loss, config(gpu_memory=budget, host_memory=0))
    for _ in range(2):  # the same two plans serve the next update
        (first, *later), gradients = of_micro_batches(step, model, ids, 3)
        (3 * square_loss(model, ids)).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
        model.zero_grad(set_to_none=True)
        assert all(plan.peak_gpu_bytes <= 0.97 * budget for plan in later)
        assert {choice.kept for choice in cuts(later[-1])} != {"products"}
    told = [r.reason for r in step.report.remarks if r.pass_name == "plan"]
    assert len(told) == 1
    assert "gradients of another micro-batch" in told[0]
    assert {choice.kept for choice in cuts(first)} != {"products"}, "the last plan is what is shown"
