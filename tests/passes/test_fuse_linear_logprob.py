"""``fuse-linear-logprob``: what it makes of a loss, why it declines, and that numbers agree."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fxrl.ir.plan import Keep, Plan
from fxrl.ir.printer import print_graph
from fxrl.passes.fuse_linear_logprob import FuseLinearLogprob
from tests.passes.lowered import call, head_inputs, lowered


def pick(logps, ids):
    return logps.gather(-1, ids[:, None])[:, 0]


def logprob(hidden, weight, ids):
    return pick((F.linear(hidden, weight) / 0.5).log_softmax(-1), ids).sum()


def entropy_bonus(hidden, weight, ids):
    logps = F.linear(hidden, weight).log_softmax(-1)
    return (pick(logps, ids) - 0.1 * (logps.exp() * logps).sum(-1)).sum()


def test_applied():
    gm = lowered(logprob, *head_inputs())
    report = FuseLinearLogprob(tile_tokens=2).run(gm)
    assert_expected_inline(
        print_graph(gm),
        """\
%hidden = input : f64[6, 4]
%weight = input : f64[32, 4]
%ids = input : i64[6]
%unsqueeze = aten.unsqueeze.default(%ids, 1) : i64[6, 1]
%reshape_default = aten.reshape.default(%unsqueeze, [-1]) : i64[6]
%linear_logprob_default = fxrl.linear_logprob.default(%hidden, %weight, %reshape_default, scale=2.0, outputs='logprob', grad_outputs='logprob', chunk_tokens=2) : (f64[6], f64[0], f64[0], b8[0], f64[0], f64[0], f64[0])
%getitem = operator.getitem(%linear_logprob_default, 0) : f64[6]
%reshape_default_1 = aten.reshape.default(%getitem, [-1, 1]) : f64[6, 1]
%select = aten.select.int(%reshape_default_1, 1, 0) : f64[6]
%sum_1 = aten.sum.default(%select) : f64[]
return %sum_1""",
    )
    assert_expected_inline(
        _plain(report),
        """applied: fuse-linear-logprob @ 0:loss/mm: logits [6 x 32] never exist; computes logprob""",
    )


def test_applied_under_a_shift_projects_only_the_rows_that_are_read():
    def shifted(hidden, weight, ids):
        return pick(F.linear(hidden, weight)[:-1].log_softmax(-1), ids[1:]).sum()

    gm = lowered(shifted, *head_inputs())
    FuseLinearLogprob(tile_tokens=2).run(gm)
    assert_expected_inline(
        print_graph(gm),
        """\
%hidden = input : f64[6, 4]
%weight = input : f64[32, 4]
%ids = input : i64[6]
%slice_tensor = aten.slice.Tensor(%hidden, 0, 0, -1) : f64[5, 4]
%slice_2 = aten.slice.Tensor(%ids, 0, 1, 9223372036854775807) : i64[5]
%unsqueeze = aten.unsqueeze.default(%slice_2, 1) : i64[5, 1]
%reshape_default = aten.reshape.default(%unsqueeze, [-1]) : i64[5]
%linear_logprob_default = fxrl.linear_logprob.default(%slice_tensor, %weight, %reshape_default, outputs='logprob', grad_outputs='logprob', chunk_tokens=2) : (f64[5], f64[0], f64[0], b8[0], f64[0], f64[0], f64[0])
%getitem = operator.getitem(%linear_logprob_default, 0) : f64[5]
%reshape_default_1 = aten.reshape.default(%getitem, [-1, 1]) : f64[5, 1]
%select = aten.select.int(%reshape_default_1, 1, 0) : f64[5]
%sum_1 = aten.sum.default(%select) : f64[]
return %sum_1""",
    )


def ids_of_another_width(hidden, weight, ids):
    return pick(F.linear(hidden, weight).log_softmax(-1), ids.to(torch.int32)).sum()


def everything_at_once(hidden, weight, ids):
    """Bias, scale, softcap and temperature; five statistics, three of them differentiated."""
    bias = torch.linspace(-1, 1, 32, dtype=hidden.dtype)
    temperature = torch.linspace(0.5, 2, 6, dtype=hidden.dtype)
    logits = torch.tanh((F.linear(hidden, weight) + bias) * 0.3 / 2.0) * 2.0 / temperature[:, None]
    probs = logits.softmax(-1)
    entropy = logits.logsumexp(-1) - (probs * logits).sum(-1)
    with torch.no_grad():
        hits = (logits.argmax(-1) == ids).to(hidden.dtype)
    mean = logits.mean(-1)
    return (pick(probs, ids).log() + 0.1 * entropy + (probs * probs).sum(-1) + mean + hits).sum()


def stable_by_hand(hidden, weight, ids):
    logits = F.linear(hidden, weight)
    top = logits.detach().amax(-1, keepdim=True)
    lse = (logits - top).exp().sum(-1).log() + top[:, 0]
    return (pick(logits, ids) - lse).sum()


def categorical(hidden, weight, ids):
    policy = torch.distributions.Categorical(logits=F.linear(hidden, weight), validate_args=False)
    return (policy.log_prob(ids) + policy.entropy()).sum()


def cross_entropy_with_padding(hidden, weight, ids):
    labels = torch.where(ids % 3 == 0, -100, ids)
    return F.cross_entropy(F.linear(hidden, weight), labels)


def labels_that_are_made_safe_in_several_ways(hidden, weight, ids):
    """All pick and compare by one target, as labels of -1 are no tokens."""
    labels = torch.where(ids % 3 == 0, -1, ids)
    logits = F.linear(hidden, weight)
    written = labels.clone()
    written[labels == -1] = 0
    loss = F.cross_entropy(logits, labels.view(-1), ignore_index=-1)
    loss = loss - pick(logits.softmax(-1), labels.clamp(min=0)).sum()
    for compared in (labels, written, labels[:]):
        loss = loss * (1 + (logits.argmax(-1) == compared).sum())
    return loss - pick(logits, written).sum()


def labels_that_count_from_the_end(hidden, weight, ids):
    labels = torch.where(ids % 3 == 0, ids - 32, ids)
    logps = F.linear(hidden, weight).log_softmax(-1)
    hits = (logps.argmax(-1) == labels).sum()
    return logps[torch.arange(6), labels].sum() * (1 + hits)


def categorical_of_divided_logits(hidden, weight, ids):
    policy = torch.distributions.Categorical(
        logits=F.linear(hidden, weight) / 0.7, validate_args=False
    )
    return (policy.log_prob(ids) + policy.entropy()).sum()


def detached_metric(hidden, weight, ids):
    logps = F.linear(hidden, weight).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
    return (pick(logps, ids) * entropy).sum()


def summed_at_once(hidden, weight, ids):
    return F.linear(hidden, weight).log_softmax(-1).sum()


def statistics_of_divided_logits(hidden, weight, ids):
    """A number divides the logits: what is linear in them is read as a statistic of the quotient."""
    logits = F.linear(hidden, weight) / 0.7
    logp = pick(logits, ids) - logits.logsumexp(-1)
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    hits = (logits.argmax(-1) == ids).to(logits) + logits.mean(-1)
    return (logp + 0.1 * entropy + 0.01 * hits).sum()


def statistics_of_both(hidden, weight, ids):
    """The quotient's own statistic, then one of the logits that is linear."""
    logits = F.linear(hidden, weight)
    return (logits.log_softmax(-1).mean(-1) - pick(logits / 0.7, ids)).sum()


def logs_statistics_of_all_logits(hidden, weight, ids):
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        watched = logits.max() + logits.mean() + logits.amax() + logits.logsumexp((0, 1))
    return pick(logits.log_softmax(-1), ids).sum() * watched


@pytest.mark.parametrize(
    "loss",
    [
        logprob,
        entropy_bonus,
        summed_at_once,
        logs_statistics_of_all_logits,
        statistics_of_divided_logits,
        statistics_of_both,
        ids_of_another_width,
        everything_at_once,
        stable_by_hand,
        categorical,
        categorical_of_divided_logits,
        cross_entropy_with_padding,
        labels_that_are_made_safe_in_several_ways,
        labels_that_count_from_the_end,
        detached_metric,
    ],
    ids=lambda loss: loss.__name__,
)
def test_values_and_gradients_equal_eager(loss):
    hidden, weight, ids = head_inputs()
    gm = lowered(loss, hidden, weight, ids)
    report = FuseLinearLogprob(tile_tokens=2).run(gm)
    assert [remark.kind for remark in report.remarks] == ["applied"]
    assert not any("mm" in str(node.target) for node in gm.graph.nodes)
    expected = loss(hidden, weight, ids)
    result = call(gm, hidden=hidden, weight=weight, ids=ids)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    for leaf in (hidden, weight):
        (found,) = torch.autograd.grad(result, leaf, retain_graph=True)
        (truth,) = torch.autograd.grad(expected, leaf, retain_graph=True)
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------------------- misses
def two_temperatures(hidden, weight, ids):
    logits = F.linear(hidden, weight)
    return (pick((logits / 2).log_softmax(-1), ids) + logits.logsumexp(-1)).sum()


def two_targets(hidden, weight, ids):
    logps = F.linear(hidden, weight).log_softmax(-1)
    return (pick(logps, ids) + pick(logps, 31 - ids)).sum()


def a_hit_at_another_padding(hidden, weight, ids):
    """Ids behind a mask of their own are tokens there as well."""
    logits = F.linear(hidden, weight)
    hits = (logits.argmax(-1) == ids).to(logits)
    return (pick(logits.log_softmax(-1), ids.masked_fill(ids > 9, 0)) * hits).sum()


def several_entries(hidden, weight, ids):
    logps = F.linear(hidden, weight).log_softmax(-1)
    return logps.gather(-1, torch.stack([ids, 31 - ids], -1)).sum()


def top_k(hidden, weight, ids):
    return F.linear(hidden, weight).softmax(-1).topk(3, -1).values.sum()


def maximum(hidden, weight, ids):
    return F.linear(hidden, weight).amax(-1).sum()


def straight_through(hidden, weight, ids):
    logps = F.linear(hidden, weight).log_softmax(-1)
    return (logps.exp().detach() * logps).sum(-1).sum()


def reweighted(hidden, weight, ids):
    return pick((F.linear(hidden, weight) * weight[:, 0]).log_softmax(-1), ids).sum()


def two_heads(hidden, weight, ids):
    kl = F.linear(hidden, weight).log_softmax(-1) - F.linear(hidden * 2, weight).log_softmax(-1)
    return (kl * kl).sum(-1).sum()


def mixes_tokens(hidden, weight, ids):
    return pick(F.linear(hidden, weight).softmax(0), ids).sum()


MISSES = {
    two_temperatures: "two different transforms of the logits are reduced",
    two_targets: "log-probs of two different targets are taken",
    a_hit_at_another_padding: "log-probs of two different targets are taken",
    several_entries: "several entries per token are gathered",
    top_k: "<built-in function getitem> over the vocabulary is another statistic",
    maximum: "the gradient of a maximum over the vocabulary is asked for",
    straight_through: "a product of a detached and a differentiated factor",
    reweighted: "the logits are multiplied by a tensor",
    two_heads: "the logits of several heads are used together",
    mixes_tokens: "aten._softmax.default runs over tokens (at %_softmax)",
}


@pytest.mark.parametrize("loss", MISSES, ids=lambda loss: loss.__name__)
def test_missed_with_its_reason_and_the_graph_unchanged(loss):
    gm = lowered(loss, *head_inputs())
    before = print_graph(gm)
    report = FuseLinearLogprob(tile_tokens=2).run(gm)
    assert {(remark.kind, remark.reason) for remark in report.remarks} == {("missed", MISSES[loss])}
    assert all("test_fuse_linear_logprob.py:" in remark.source for remark in report.remarks)
    assert print_graph(gm) == before


@pytest.mark.parametrize(
    ("tokens", "classes", "few"), [(None, 3, "3 classes of 4 features"), (0, None, "no tokens")]
)
def test_a_head_with_nothing_to_save_is_a_fact(tokens, classes, few):
    hidden, weight, ids = head_inputs()
    gm = lowered(logprob, hidden[:tokens], weight[:classes], ids[:tokens] % (classes or 3))
    (remark,) = FuseLinearLogprob().run(gm).remarks
    assert (remark.kind, remark.reason) == ("analysis", f"{few}: nothing to save")


def test_a_size_that_is_read_off_the_logits_keeps_none_of_them():
    """What ``cross_entropy`` gives per token has the shape of its input, whose sizes vary."""

    def per_token(hidden, weight, ids):
        logits = F.linear(hidden, weight)[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum()

    hidden, weight, ids = head_inputs()
    hidden, ids = hidden.detach().view(2, 3, 4).requires_grad_(), ids.view(2, 3)
    for tensor in (hidden, ids):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    gm = lowered(per_token, hidden, weight, ids)
    (remark,) = FuseLinearLogprob(tile_tokens=2).run(gm).remarks
    assert remark.kind == "applied"
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)


def test_one_row_for_as_many_tokens_as_there_are_is_told_with_a_cure():
    def of_a_prompt(hidden, weight, ids):
        return F.cross_entropy(F.linear(hidden[:1], weight).expand(ids.shape[0], -1), ids)

    hidden, weight, ids = head_inputs()
    torch._dynamo.maybe_mark_dynamic(ids, 0)
    (remark,) = FuseLinearLogprob().run(lowered(of_a_prompt, hidden, weight, ids)).remarks
    assert remark.reason == "rows are expanded to other tokens (at %expand)"
    assert remark.cure == "expand the hidden states ahead of the product with the head"


def test_missed_when_it_saves_too_little():
    gm = lowered(logprob, *head_inputs())
    report = FuseLinearLogprob(min_saved_bytes=2**20).run(gm)
    (remark,) = report.remarks
    assert remark.kind == "missed"
    assert remark.reason == "it would save 4.5 KiB, below min_saved_bytes=1 MiB"


def test_missed_when_the_plan_keeps_it():
    gm = lowered(logprob, *head_inputs())
    plan = Plan({"0:loss/mm": Keep("the planner found no room")})
    (remark,) = FuseLinearLogprob().run(gm, plan).remarks
    assert (remark.kind, remark.reason) == ("missed", "the planner found no room")


def _plain(report):
    return "\n".join(f"{r.kind}: {r.pass_name} @ {r.site}: {r.reason}" for r in report.remarks)
