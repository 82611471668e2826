"""``group-heads``: a layer's attention in groups of heads, a region inside the layer's region."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxrl
from fxrl.ir.plan import CutLayer, Plan
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls, regions_of
from fxrl.models import lora, tiny_config
from fxrl.passes.group_heads import GroupHeads
from tests.capture.mixer import assert_matches_eager, fixed, outcome
from tests.compile.region_cases import saved_bytes
from tests.passes.layered import Block, ids_batch, make_stack, outlined, square_loss
from tests.passes.lowered import plain

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
GROUPS = Plan({f"0:blocks.{i}": CutLayer(head_groups=2) for i in range(4)})
OPTIONS = {"passes": ("offload", "tile-tokens", "group-heads"), "on_miss": "error"}
ONE_BY_ONE = fxrl.Config(**OPTIONS, compile_regions=False)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def with_adapters(model):
    """A model whose linear layers have adapters that change something."""
    model = lora(model, r=2, fp32_adapter=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


# ---------------------------------------------------------------------------- applied
def test_attention_becomes_a_region_inside_the_layers():
    gm = outlined()
    assert_expected_inline(
        plain(GroupHeads().run(gm, GROUPS)),
        """\
applied: group-heads @ 0:blocks.0: attention runs in 2 groups of heads
applied: group-heads @ 0:blocks.1: attention runs in 2 groups of heads""",
    )
    (layer,) = regions_of(gm).values()
    (inner,) = regions_of(layer.forward).values()
    assert inner.groups == 2
    assert [spec.split for spec in inner.inputs] == [0, None, 0, 0, 0]
    assert_expected_inline(
        print_graph(inner.forward),
        """\
%part_0 = input : f64[4, 8]
%shared_1 = input : f64[2, 5, 8]
%part_2 = input : f64[4, 8]
%part_3 = input : f64[4, 8]
%part_4 = input : f64[4, 8]
%t_default = aten.t.default(%part_0) : f64[8, 4]
%view_default = aten.view.default(%shared_1, [10, 8]) : f64[10, 8]
%mm_default = aten.mm.default(%view_default, %t_default) : f64[10, 4]
%reshape_default = aten.reshape.default(%mm_default, [2, 5, 4]) : f64[2, 5, 4]
%reshape_default_1 = aten.reshape.default(%reshape_default, [2, 5, 1, 4]) : f64[2, 5, 1, 4]
%transpose_int = aten.transpose.int(%reshape_default_1, 1, 2) : f64[2, 1, 5, 4]
%t_default_1 = aten.t.default(%part_2) : f64[8, 4]
%mm_default_1 = aten.mm.default(%view_default, %t_default_1) : f64[10, 4]
%reshape_default_2 = aten.reshape.default(%mm_default_1, [2, 5, 4]) : f64[2, 5, 4]
%reshape_default_3 = aten.reshape.default(%reshape_default_2, [2, 5, 1, 4]) : f64[2, 5, 1, 4]
%transpose_int_1 = aten.transpose.int(%reshape_default_3, 1, 2) : f64[2, 1, 5, 4]
%t_default_2 = aten.t.default(%part_3) : f64[8, 4]
%mm_default_2 = aten.mm.default(%view_default, %t_default_2) : f64[10, 4]
%reshape_default_4 = aten.reshape.default(%mm_default_2, [2, 5, 4]) : f64[2, 5, 4]
%reshape_default_5 = aten.reshape.default(%reshape_default_4, [2, 5, 1, 4]) : f64[2, 5, 1, 4]
%transpose_int_2 = aten.transpose.int(%reshape_default_5, 1, 2) : f64[2, 1, 5, 4]
%scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%transpose_int, %transpose_int_1, %transpose_int_2, is_causal=True) : f64[2, 1, 5, 4]
%transpose_int_3 = aten.transpose.int(%scaled_dot_product_attention_default, 1, 2) : f64[2, 5, 1, 4]
%reshape_default_6 = aten.reshape.default(%transpose_int_3, [2, 5, 4]) : f64[2, 5, 4]
%reshape_default_7 = aten.reshape.default(%reshape_default_6, [10, 4]) : f64[10, 4]
%mm_default_3 = aten.mm.default(%reshape_default_7, %part_4) : f64[10, 8]
return %mm_default_3""",
    )
    (call,) = region_calls(layer.forward)
    assert [tuple(value.meta["val"].shape) for value in call.users] == [(10, 8)]


def test_a_layer_of_two_forwards_is_grouped_in_both():
    def loss_fn(model, batch):
        return (model(batch["ids"]) - model(batch["ids"].flip(1))).square().mean()

    model = make_stack(4)
    step = fxrl.optimize(model, loss_fn, ONE_BY_ONE, plan=GROUPS)
    assert_matches_eager(step, loss_fn, model, ids_batch(), tol=1e-12)
    calls = region_calls(step.captures[0].rewritten.gm)
    assert [len(regions_of(call.meta["region"].forward)) for call in calls] == [1] * 8


def test_nothing_is_asked_for():
    gm = outlined()
    before = print_graph(gm)
    assert GroupHeads().run(gm).remarks == ()
    assert print_graph(gm) == before


# ---------------------------------------------------------------------------- missed
class Attention(Block):
    """Of 4 heads; ``made`` says how queries, keys and values come about."""

    def __init__(self, width=8, heads=4):
        super().__init__(width, heads)
        self.joint = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.made(x))
        attended = self.attend(q, k, v).transpose(1, 2).reshape(rows, length, width)
        return self.mlp(x + self.out(attended))

    def made(self, x):
        return [self.qkv[name](x) for name in "qkv"]

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Halves(Attention):
    """Features in two halves, as some turn them for RoPE."""

    def made(self, x):
        q, k, v = super().made(x)
        return self.turned(q), self.turned(k), v

    def turned(self, x):
        one, other = x.unflatten(-1, (self.heads, -1)).chunk(2, -1)
        return torch.cat([-other, one], -1).flatten(-2)


class NormOfAllHeads(Attention):
    def made(self, x):
        q, k, v = super().made(x)
        return q * torch.rsqrt(q.square().mean(-1, keepdim=True)), k, v


class OneProduct(Attention):
    def made(self, x):
        return self.joint(x).split(x.shape[-1], -1)


class OtherHeadsValues(Attention):
    def attend(self, q, k, v):
        return super().attend(q, k, v.flip(1))


class Twice(Attention):
    def attend(self, q, k, v):
        return super().attend(super().attend(q, k, v), k, v)


class TalkingHeads(Attention):
    def attend(self, q, k, v):
        attended = super().attend(q, k, v)
        return attended - attended.mean(1, keepdim=True)


class NoLinear(Attention):
    def made(self, x):
        return torch.sin(x), *super().made(x)[1:]


class NotSummed(Attention):
    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in self.made(x))
        return x + self.attend(q, k, v).transpose(1, 2).reshape(rows, length, width)


MISSED = [
    (NormOfAllHeads, 2, "mean.dim runs over the heads of a layer"),
    (OneProduct, 2, "one product makes queries, keys and values together"),
    (OtherHeadsValues, 2, "flip.default runs over the heads of a layer"),
    (Twice, 2, "2 calls of scaled_dot_product_attention"),
    (TalkingHeads, 2, "mean.dim runs over the heads of a layer"),
    (NoLinear, 2, "no product makes its queries head by head"),
    (NotSummed, 2, "the layer returns a value of heads"),
    (Attention, 3, "4 heads of keys are not 3 groups"),
]


@pytest.mark.parametrize(
    ("block", "groups", "reason"), MISSED, ids=lambda x: getattr(x, "__name__", "")
)
def test_missed_where_heads_are_not_apart(block, groups, reason):
    gm = outlined(1, block=block)
    before = [print_graph(region.forward) for region in regions_of(gm).values()]
    plan = Plan({"0:blocks.0": CutLayer(head_groups=groups)})
    (remark,) = GroupHeads().run(gm, plan).remarks
    assert remark.kind == "missed"
    assert reason in remark.reason
    assert [print_graph(region.forward) for region in regions_of(gm).values()] == before


# ---------------------------------------------------------------------------- numbers
CUTS = ("products", "fewest", "attention", "inputs")
PLACES = ("gpu", "host")
#: Every value beside every other: cuts, where inputs and the rest wait, tiles, groups.
MIXTURE = [
    CutLayer(cut, PLACES[g ^ (i & 1)], PLACES[g ^ (i >> 1)], 3 * (g ^ (i & 1)), 2 + 2 * g)
    for g, (i, cut) in itertools.product((0, 1), enumerate(CUTS))
]


def test_any_mixture_of_choices_has_eagers_numbers():
    choices = {f"0:blocks.{i}": choice for i, choice in enumerate(MIXTURE)}
    model = make_stack(len(choices), heads=4)
    step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=Plan(choices))
    for shape in ((2, 5), (2, 2)):
        assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-12)
    applied = [r.site for r in step.report.remarks if r.pass_name == "group-heads"]
    assert sorted(applied) == sorted(choices)


def test_features_of_a_head_may_be_taken_apart():
    model = make_stack(1, block=Halves)
    step = fxrl.optimize(
        model, square_loss, ONE_BY_ONE, plan=Plan({"0:blocks.0": CutLayer(head_groups=4)})
    )
    assert_matches_eager(step, square_loss, model, fixed(ids_batch()), tol=1e-12)
    assert "group-heads" in {r.pass_name for r in step.report.of_kind("applied")}


class UnderMask(Block):
    """Of 4 query heads over 2 of keys, under a mask of the model's."""

    def __init__(self, width=8, heads=4):
        super().__init__(width, heads)
        for name in "kv":
            self.qkv[name] = nn.Linear(width, width // 2, bias=False)

    def forward(self, x, mask):
        q, k, v = (self.qkv[n](x).unflatten(-1, (-1, 2)).transpose(1, 2) for n in "qkv")
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.mlp(x + self.out(attended.transpose(1, 2).flatten(2)))


def of_documents(ids, at):
    return ids[:, None, :, None] == ids[:, None, None, :]


def of_windows(ids, at):
    """Each head has a window of its own."""
    return at[:, None] - at < torch.arange(1, 5)[:, None, None]


@pytest.mark.parametrize(("mask", "cut"), [(of_documents, "attention"), (of_windows, "inputs")])
def test_under_a_computed_mask(mask, cut):
    def loss(model, batch):
        x, at = model.embed(batch["ids"]), torch.arange(batch["ids"].shape[1])
        seen = mask(batch["ids"], at) & (at <= at[:, None])
        for block in model.blocks:
            x = block(x, seen)
        return model.head(x).square().mean()

    model = make_stack(2, block=UnderMask)
    passes = ("factor-masks", "group-heads")
    config = fxrl.Config(passes=passes, compile_regions=False, on_miss="error")
    plan = Plan({f"0:blocks.{i}": CutLayer(cut, head_groups=2) for i in range(2)})
    step = fxrl.optimize(model, loss, config, plan=plan)
    for shape in ((2, 5), (3, 7)):
        assert_matches_eager(step, loss, model, ids_batch(*shape), tol=1e-12)
    applied = [r.pass_name for r in step.report.of_kind("applied")]
    assert [applied.count(name) for name in passes] == [1, 2]


def tiny(kind, adapters):
    import transformers

    config = tiny_config(
        kind, layers=1, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=4, experts=2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    return with_adapters(model) if adapters else model


def logits_loss(model, batch):
    return model(batch["ids"], use_cache=False).logits.square().mean()


@pytest.mark.parametrize(
    ("kind", "adapters", "site"),
    [
        # grouped queries, norms, RoPE, all of which Gemma has, too
        pytest.param("qwen3", True, "0:base_model.model.model.layers.0", marks=pytest.mark.slow),
        ("qwen2", False, "0:model.layers.0"),  # biases, all trained
        ("gemma3", True, "0:base_model.model.model.layers.0"),  # a window's mask
    ],
)
def test_architectures(kind, adapters, site):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    model = tiny(kind, adapters)
    plan = Plan({site: CutLayer("attention", head_groups=2)})
    config = fxrl.Config(passes=("group-heads",), compile_regions=False)
    step = fxrl.optimize(model, logits_loss, config, plan=plan)
    assert_matches_eager(step, logits_loss, model, fixed(ids_batch(3, 9)), tol=1e-12)
    (remark,) = (r for r in step.report.remarks if r.pass_name == "group-heads")
    assert (remark.site, remark.kind) == (site, "applied")
    layers = [kernels.region.forward for kernels in step.captures[0].kernels.values()]
    (call,) = (call for layer in layers for call in region_calls(layer))
    assert len(call.meta["val"]) == 1, (
        "an adapter's part of the output is summed with its product's"
    )


def test_compiled():
    model = make_stack(2, heads=4)
    plan = Plan(
        {f"0:blocks.{i}": CutLayer("attention", tile_tokens=4, head_groups=4) for i in range(2)}
    )
    step = fxrl.optimize(model, square_loss, fxrl.Config(**OPTIONS), plan=plan)
    batch = fixed(ids_batch())  # sizes that vary: tests/compile/test_region_op.py
    assert_matches_eager(step, square_loss, model, batch, tol=1e-12)
    assert step.verify(batch).ok


def test_bf16_is_no_further_from_the_truth_than_eager():
    exact, batch = make_stack(2, heads=4, width=64), fixed(ids_batch(4, 32))
    model = make_stack(2, heads=4, width=64).bfloat16()
    exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    _, true = outcome(lambda b: square_loss(exact, b), exact, batch)
    plan = Plan({f"0:blocks.{i}": CutLayer("inputs", head_groups=4) for i in range(2)})
    step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=plan)

    def distance(loss):
        _, found = outcome(loss, model, batch)
        off = torch.stack([(found[name].double() - g).norm() for name, g in true.items()]).norm()
        return off / torch.stack([g.norm() for g in true.values()]).norm()

    assert distance(step) <= 1.2 * distance(lambda b: square_loss(model, b))


# ---------------------------------------------------------------------------- what it is for
@pytest.mark.parametrize(
    ("cut", "forwards"), [pytest.param("attention", 1, marks=pytest.mark.slow), ("inputs", 3)]
)
def test_what_attention_returned_is_kept_by_groups(cut, forwards):
    """As in a layer whose heads run together: as many bytes, and attention runs no second time."""
    model, batch, kept = make_stack(2, heads=4), fixed(ids_batch(4, 16)), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for groups in (0, 4):
        plan = Plan({f"0:blocks.{i}": CutLayer(cut, head_groups=groups) for i in range(2)})
        step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=plan)
        step(batch)
        kept[groups] = saved_bytes(lambda step=step: step(batch), without=weights)
    assert kept[4] == kept[0]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(batch).backward()
    names = [event.name for event in seen.events()]
    ran = [names.count(f"aten::{FLASH}{half}") for half in ("", "_backward")]
    assert ran == [2 * 4 * forwards, 2 * 4]


def test_no_more_than_a_group_is_alive():
    model, batch, heads = make_stack(2, heads=4), fixed(ids_batch(4, 16)), {}
    for groups in (0, 4):
        plan = Plan({f"0:blocks.{i}": CutLayer("attention", head_groups=groups) for i in range(2)})
        step = fxrl.optimize(model, square_loss, ONE_BY_ONE, plan=plan)
        step(batch)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            step(batch).backward()
        shapes = [s for e in seen.events() if "flash_attention" in e.name for s in e.input_shapes]
        heads[groups] = {shape[1] for shape in shapes if len(shape) == 4}
    assert heads == {0: {4}, 4: {1}}
