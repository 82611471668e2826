"""``outline-layers``: layers become regions, once for all that are alike."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fxrl
from fxrl.ir.on_miss import MissedRewriteWarning
from fxrl.ir.plan import Keep, Plan
from fxrl.ir.printer import print_graph
from fxrl.ir.region import regions_of
from fxrl.passes.outline_layers import OutlineLayers
from tests.capture.mixer import assert_matches_eager
from tests.passes.layered import Block, Stack, ids_batch, make_stack, square_loss
from tests.passes.lowered import lowered, plain

ONLY = fxrl.Config(passes=("recompute",), compile_regions=False, on_miss="error")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def graph_of(model, batch=None):
    return lowered(lambda b: square_loss(model, b), batch or ids_batch())


def printed(gm):
    """The graph, as all versions of torch spell it: some copy a product before it is added, and
    views of products have two names."""
    names, lines = {}, []
    for line in re.sub(r"'[0-9a-f]{16}'", "'ID'", print_graph(gm)).splitlines():
        line = re.sub(r"%[\w.]+", lambda found: names.get(found[0], found[0]), line)
        if copy := re.match(r"(%\w+) = aten\.clone\.default\((%[\w.]+)\)", line):
            names[copy[1]] = copy[2]
            continue
        if view := re.match(r"(%\w+) = aten\.(_unsafe_)?view\.default", line):
            names[view[1]] = f"%view_{len(lines)}"
            line = f"{names[view[1]]} = aten.view.default{line[view.end() :]}"
        lines.append(line)
    return "\n".join(lines)


# ---------------------------------------------------------------------------- what it makes
def test_applied():
    gm = graph_of(make_stack(2))
    report = OutlineLayers().run(gm)
    assert_expected_inline(
        "\n".join(line for line in printed(gm).splitlines() if "= input" not in line),
        """\
%embedding = aten.embedding.default(%model.embed.weight, %b_ids) : f64[2, 5, 8]
%region_default = fxrl.region.default([%embedding, %model.blocks.0.norm, %model.blocks.0.qkv.q.weight, %model.blocks.0.qkv.k.weight, %model.blocks.0.qkv.v.weight, %model.blocks.0.out.weight, %model.blocks.0.up.weight, %model.blocks.0.up.bias, %model.blocks.0.down.weight, %model.blocks.0.down.bias], 'ID', 0, []) : (f64[2, 5, 8])
%getitem = operator.getitem(%region_default, 0) : f64[2, 5, 8]
%region_default_1 = fxrl.region.default([%getitem, %model.blocks.1.norm, %model.blocks.1.qkv.q.weight, %model.blocks.1.qkv.k.weight, %model.blocks.1.qkv.v.weight, %model.blocks.1.out.weight, %model.blocks.1.up.weight, %model.blocks.1.up.bias, %model.blocks.1.down.weight, %model.blocks.1.down.bias], 'ID', 0, []) : (f64[2, 5, 8])
%getitem_1 = operator.getitem(%region_default_1, 0) : f64[2, 5, 8]
%view_27 = aten.view.default(%getitem_1, [10, 8]) : f64[10, 8]
%t_12 = aten.t.default(%model.head.weight) : f64[8, 3]
%addmm_4 = aten.addmm.default(%model.head.bias, %view_27, %t_12) : f64[10, 3]
%view_30 = aten.view.default(%addmm_4, [2, 5, 3]) : f64[2, 5, 3]
%pow_3 = aten.pow.Tensor_Scalar(%view_30, 2) : f64[2, 5, 3]
%mean_2 = aten.mean.default(%pow_3) : f64[]
return %mean_2""",
    )
    assert_expected_inline(
        plain(report),
        """applied: outline-layers @ 0:blocks.0-1: blocks.0 to blocks.1 in 2 calls of 1 compiled body""",
    )


def test_the_body_of_a_part():
    gm = graph_of(make_stack(2))
    OutlineLayers().run(gm)
    (first,) = regions_of(gm).values()
    assert_expected_inline(
        printed(first.forward),
        """\
%arg0 = input : f64[2, 5, 8]
%arg1 = input : f64[8]
%arg2 = input : f64[8, 8]
%arg3 = input : f64[8, 8]
%arg4 = input : f64[8, 8]
%arg5 = input : f64[8, 8]
%arg6 = input : f64[16, 8]
%arg7 = input : f64[16]
%arg8 = input : f64[8, 16]
%arg9 = input : f64[8]
%pow_tensor_scalar = aten.pow.Tensor_Scalar(%arg0, 2) : f64[2, 5, 8]
%mean_dim = aten.mean.dim(%pow_tensor_scalar, [-1], True) : f64[2, 5, 1]
%add_tensor = aten.add.Tensor(%mean_dim, 1e-06) : f64[2, 5, 1]
%rsqrt_default = aten.rsqrt.default(%add_tensor) : f64[2, 5, 1]
%mul_tensor = aten.mul.Tensor(%arg0, %rsqrt_default) : f64[2, 5, 8]
%mul_tensor_1 = aten.mul.Tensor(%mul_tensor, %arg1) : f64[2, 5, 8]
%t_default = aten.t.default(%arg2) : f64[8, 8]
%view_17 = aten.view.default(%mul_tensor_1, [10, 8]) : f64[10, 8]
%mm_default = aten.mm.default(%view_17, %t_default) : f64[10, 8]
%view_19 = aten.view.default(%mm_default, [2, 5, 8]) : f64[2, 5, 8]
%view_20 = aten.view.default(%view_19, [2, 5, 2, 4]) : f64[2, 5, 2, 4]
%transpose_int = aten.transpose.int(%view_20, 1, 2) : f64[2, 2, 5, 4]
%t_default_1 = aten.t.default(%arg3) : f64[8, 8]
%view_23 = aten.view.default(%mul_tensor_1, [10, 8]) : f64[10, 8]
%mm_default_1 = aten.mm.default(%view_23, %t_default_1) : f64[10, 8]
%view_25 = aten.view.default(%mm_default_1, [2, 5, 8]) : f64[2, 5, 8]
%view_26 = aten.view.default(%view_25, [2, 5, 2, 4]) : f64[2, 5, 2, 4]
%transpose_int_1 = aten.transpose.int(%view_26, 1, 2) : f64[2, 2, 5, 4]
%t_default_2 = aten.t.default(%arg4) : f64[8, 8]
%view_29 = aten.view.default(%mul_tensor_1, [10, 8]) : f64[10, 8]
%mm_default_2 = aten.mm.default(%view_29, %t_default_2) : f64[10, 8]
%view_31 = aten.view.default(%mm_default_2, [2, 5, 8]) : f64[2, 5, 8]
%view_32 = aten.view.default(%view_31, [2, 5, 2, 4]) : f64[2, 5, 2, 4]
%transpose_int_2 = aten.transpose.int(%view_32, 1, 2) : f64[2, 2, 5, 4]
%scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%transpose_int, %transpose_int_1, %transpose_int_2, is_causal=True) : f64[2, 2, 5, 4]
%transpose_int_3 = aten.transpose.int(%scaled_dot_product_attention_default, 1, 2) : f64[2, 5, 2, 4]
%reshape_default = aten.reshape.default(%transpose_int_3, [2, 5, 8]) : f64[2, 5, 8]
%t_default_3 = aten.t.default(%arg5) : f64[8, 8]
%reshape_default_1 = aten.reshape.default(%reshape_default, [10, 8]) : f64[10, 8]
%mm_default_3 = aten.mm.default(%reshape_default_1, %t_default_3) : f64[10, 8]
%view_40 = aten.view.default(%mm_default_3, [2, 5, 8]) : f64[2, 5, 8]
%add_tensor_1 = aten.add.Tensor(%arg0, %view_40) : f64[2, 5, 8]
%view_42 = aten.view.default(%add_tensor_1, [10, 8]) : f64[10, 8]
%t_default_4 = aten.t.default(%arg6) : f64[8, 16]
%addmm_default = aten.addmm.default(%arg7, %view_42, %t_default_4) : f64[10, 16]
%view_45 = aten.view.default(%addmm_default, [2, 5, 16]) : f64[2, 5, 16]
%silu_default = aten.silu.default(%view_45) : f64[2, 5, 16]
%mul_tensor_2 = aten.mul.Tensor(%silu_default, 1.0) : f64[2, 5, 16]
%view_48 = aten.view.default(%mul_tensor_2, [10, 16]) : f64[10, 16]
%t_default_5 = aten.t.default(%arg8) : f64[16, 8]
%addmm_default_1 = aten.addmm.default(%arg9, %view_48, %t_default_5) : f64[10, 8]
%view_51 = aten.view.default(%addmm_default_1, [2, 5, 8]) : f64[2, 5, 8]
%add_tensor_2 = aten.add.Tensor(%add_tensor_1, %view_51) : f64[2, 5, 8]
return %add_tensor_2""",
    )


def test_a_checkpointed_body_is_outlined_inside():
    gm = graph_of(make_stack(3, checkpointed=True))
    report = OutlineLayers().run(gm)
    assert_expected_inline(
        plain(report),
        """applied: outline-layers @ 0:blocks.0-2: blocks.0 to blocks.2 in 3 calls of 1 compiled body""",
    )
    assert "fxrl.region" not in printed(gm).split("@")[0]
    assert len(regions_of(gm)) == 1


def test_layers_that_differ_are_sites_of_their_own():
    torch.manual_seed(0)
    blocks = [Block(scale=1.0 if i % 2 else 0.5) for i in range(4)]
    gm = graph_of(Stack(blocks).double())
    report = OutlineLayers().run(gm)
    assert_expected_inline(
        plain(report),
        """\
applied: outline-layers @ 0:blocks.0-2: blocks.0, blocks.2 in 2 calls of 1 compiled body
applied: outline-layers @ 0:blocks.1-3: blocks.1, blocks.3 in 2 calls of 1 compiled body""",
    )


def test_a_forward_without_gradients_shares_the_body_of_the_trained_layers():
    """So log-probs of both are equal bit for bit, also where a body is compiled and cut."""

    def loss_fn(model, batch):
        with torch.no_grad():
            reference = model(batch["ids"])
        return (model(batch["ids"]) - reference).exp().mean()

    model = make_stack(2)
    step = fxrl.optimize(model, loss_fn, ONLY)
    assert_matches_eager(step, loss_fn, model, ids_batch(), tol=1e-12)
    assert len(step.captures[0].kernels) == 1
    assert step(ids_batch()).item() == 1


class Routed(nn.Module):
    """A layer that takes its tokens in an order of their own, as a mixture of experts does, or
    those alone that a mask leaves."""

    def __init__(self, picked):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.picked = picked

    def forward(self, x):
        tokens = F.silu(self.gate(x)).flatten(0, 1)
        picked = self.picked(tokens.detach().sum(-1))
        return x + self.down(torch.tanh(self.up(tokens[picked]))).mean(0)


#: Why a layer is in two parts.
DATA = "(aten.index.Tensor) gives a tensor whose size depends on data"


@pytest.mark.parametrize(
    ("picked", "made"),
    [
        (torch.argsort, ["2 calls of 1 compiled body"]),
        (lambda scores: scores.topk(3).indices.int(), ["2 calls of 1 compiled body"]),
        (
            lambda scores: scores > 0,
            [
                f"2 calls of 2 compiled bodies, 2 parts each: %{n} {DATA}"
                for n in ("index", "index_1")
            ],
        ),
    ],
)
def test_rows_that_are_picked(picked, made):
    """By numbers inside of a body; by a mask between two, for data says how many there are."""
    gm = graph_of(Stack([Routed(picked), Routed(picked)]).double())
    assert [r.reason.partition(" in ")[2] for r in OutlineLayers().run(gm).remarks] == made


# ---------------------------------------------------------------------------- what it leaves
class ManyPieces(nn.Module):
    """A layer that draws again and again: parts too small to pay."""

    def forward(self, x):
        for _ in range(9):
            x = torch.tanh(x * 2 + 1)
            x = F.dropout(x, 0.5)
        return x


def missed(gm):
    """The report of a miss, which leaves the graph alone and names the model's line."""
    before = print_graph(gm)
    report = OutlineLayers().run(gm)
    assert print_graph(gm) == before
    assert re.search(r"test_outline_layers\.py:\d+$", report.remarks[0].source)
    return report


def test_missed_too_many_parts():
    gm = graph_of(Stack([ManyPieces(), ManyPieces()]).double())
    assert_expected_inline(
        plain(missed(gm)),
        """missed: outline-layers @ 0:blocks.0/mul: blocks.0 to blocks.1: fall into 9 parts: %native_dropout (aten.native_dropout.default) draws random numbers, which a recompute would draw again (at %native_dropout)""",
    )


@pytest.fixture
def look():
    """A library's op that returns a view of its input, which PyTorch cannot make functional."""
    library = torch.library.Library("fxrl_recompute_test", "FRAGMENT")
    library.define("look(Tensor(a) x) -> Tensor(a)")
    library.impl("look", lambda x: x.view(x.shape), "CompositeExplicitAutograd")
    torch.library.register_fake("fxrl_recompute_test::look", lambda x: x.view(x.shape), lib=library)
    yield torch.ops.fxrl_recompute_test.look
    library._destroy()


class Looking(nn.Module):
    """A layer that gates by what an op of a library sees."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        return torch.tanh(x * 2 + 1) * torch.sigmoid(self.look(x.detach()))


def test_missed_body_that_cannot_be_lowered(look):
    gm = graph_of(Stack([Looking(look), Looking(look)], checkpointed=True).double())
    assert_expected_inline(
        plain(missed(gm)).partition(". We only support")[0],  # the rest is PyTorch's advice
        """missed: outline-layers @ 0:blocks.0/mul.x: the checkpointed body could not be lowered: RuntimeError: Found a custom (non-ATen) operator whose output has alias annotations: fxrl_recompute_test::look(Tensor(a) x) -> Tensor(a)""",
    )


class Twice(nn.Module):
    """A layer that is called twice, so that its caller can do something in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *, back):
        return torch.tanh(self.down(x)) + x if back else F.silu(self.up(x))


class DropoutBetween(Stack):
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(F.dropout(block(x, back=False), 0.5), back=True)
        return self.head(x)


def test_missed_random_numbers_between_the_calls_of_a_layer():
    gm = graph_of(DropoutBetween([Twice(), Twice()]).double())
    assert_expected_inline(
        plain(missed(gm)),
        """missed: outline-layers @ 0:blocks.0.up/view: blocks.0 to blocks.1: %native_dropout (aten.native_dropout.default) draws random numbers, which a recompute would draw again (at %native_dropout)""",
    )


class Halves(nn.Module):
    """A layer that treats halves of the tokens apart; no input says how many these are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y, half = self.linear(x), int(x.shape[1] * 0.5)
        return torch.tanh(torch.cat([y[:, :half] * 2, torch.sigmoid(y[:, half:])], 1)) * torch.exp(
            x
        )


class DropoutThenHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.halves = nn.Linear(8, 8), Halves()

    def forward(self, x):
        x = F.silu(self.gate(x)) * x
        return self.halves(F.dropout(x, 0.5))


def varying_length(rows=4, length=6):
    batch = ids_batch(rows, length)
    torch._dynamo.mark_dynamic(batch["ids"], 1)
    return batch


def test_missed_size_that_no_input_has():
    gm = graph_of(Stack([Halves(), Halves()]).double(), varying_length())
    before = print_graph(gm)
    report = OutlineLayers().run(gm)
    assert_expected_inline(
        re.sub(r"\bs\d+", "s", plain(report)),
        """missed: outline-layers @ 0:blocks.0-1: the size TruncToInt(0.5*ToFloat(s)) is told by no input (at %trunc)""",
    )
    assert print_graph(gm) == before
    assert not regions_of(gm)
    assert re.search(r"test_outline_layers\.py:\d+$", report.remarks[0].source)


def test_a_part_that_cannot_be_outlined_is_left_and_named():
    gm = graph_of(Stack([DropoutThenHalves(), DropoutThenHalves()]).double(), varying_length())
    report = OutlineLayers().run(gm)
    assert_expected_inline(
        re.sub(r"\bs\d+", "s", plain(report)),
        """applied: outline-layers @ 0:blocks.0-1: blocks.0 to blocks.1 in 2 calls of 1 compiled body, 2 parts each: %native_dropout (aten.native_dropout.default) draws random numbers, which a recompute would draw again; 2 parts run op by op: the size TruncToInt(0.5*ToFloat(s)) is told by no input""",
    )
    assert printed(gm).count("fxrl.region.default") == 2
    assert printed(gm).count("aten.tanh.default") == 2


def test_missed_by_the_plan():
    gm = graph_of(make_stack(2))
    before = print_graph(gm)
    (remark,) = OutlineLayers().run(gm).remarks
    gm = graph_of(make_stack(2))
    plan = Plan({remark.site: Keep("the plan keeps it")})
    assert_expected_inline(
        plain(OutlineLayers().run(gm, plan)),
        """missed: outline-layers @ 0:blocks.0-1: the plan keeps it""",
    )
    assert print_graph(gm) == before


@pytest.mark.parametrize(
    "outline", [OutlineLayers({"cpu": 81}), OutlineLayers(compile_regions=False)]
)
def test_declined(outline):
    gm = graph_of(make_stack(2))
    before = print_graph(gm)
    (remark,) = outline.run(gm).remarks
    assert remark.kind == "analysis"
    assert ("80 hidden values" in remark.reason) == bool(outline.least_hidden)
    assert print_graph(gm) == before


def test_nothing_repeats_no_remark():
    gm = lowered(lambda x: torch.tanh(x * 2 + 1).square().mean(), torch.randn(3, 4))
    assert OutlineLayers().run(gm).remarks == ()


def test_small_models_on_a_cpu_are_left_by_default():
    model = make_stack(2)
    step = fxrl.optimize(model, square_loss, fxrl.Config(on_miss="error"))
    step(ids_batch())
    (remark,) = (r for r in step.report.remarks if r.pass_name == "outline-layers")
    assert remark.kind == "analysis"
    assert "blocks.0 to blocks.1 run op by op: 80 hidden values" in remark.reason


def test_the_warning_names_what_stays():
    config = fxrl.Config(passes=("recompute",), compile_regions=False)
    model = Stack([ManyPieces(), ManyPieces()]).double()
    with pytest.warns(MissedRewriteWarning, match="fall into"):
        fxrl.optimize(model, square_loss, config)(ids_batch())


def test_layers_under_no_grad_get_no_gradient():
    """Of a teacher whose weights nobody froze: its regions have no backward."""
    student, teacher = make_stack(2), make_stack(3, width=12)

    def loss(batch):
        with torch.no_grad():
            wanted = teacher(batch["ids"])
        return (student(batch["ids"]) - wanted).square().mean()

    gm = lowered(loss, ids_batch())
    OutlineLayers().run(gm)
    grads = {any(spec.needs_grad for spec in region.inputs) for region in regions_of(gm).values()}
    assert grads == {True, False}
    step = fxrl.optimize(student, lambda _, batch: loss(batch), ONLY)
    found = []
    for call in (step, loss):
        student.zero_grad()
        value = call(ids_batch())
        value.backward()
        found.append((value, [p.grad for p in student.parameters()]))
    torch.testing.assert_close(*found)
    assert all(p.grad is None for p in teacher.parameters())
