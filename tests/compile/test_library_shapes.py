"""Shapes in which training libraries compute from logits: heads are rewritten, numbers are eager's.

Each shape is a way to write down log-probs, entropies or divergences that bounds the memory of
eager mode, or that came with parallel or packed code. In float64, loss and gradients are compared.
Sizes are symbolic where a shape computes with them.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxrl import Config, optimize
from fxrl.ir.on_miss import open_misses
from tests.capture.mixer import sized
from tests.rows import rows

CONFIG = Config(min_saved_bytes=0, chunk_tokens=8, compile_regions=False, on_miss="error")
HEADS = {"fuse-linear-logprob", "chunk-vocab-region"}
VOCAB, WIDTH, B, T = 19, 6, 3, 9
SHAPES: dict[str, Callable] = {}


def shape(function):
    SHAPES[function.__name__] = function
    return function


class Model(nn.Module):
    """Tokens are mixed by a running mean; the head widens."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, ids):
        x = self.embed(ids)
        return torch.tanh(self.mix(x.cumsum(1) / 3) + x)

    def forward(self, ids):
        return self.head(self.hidden(ids))


def batch(rows=B):
    draw = torch.Generator().manual_seed(rows)
    size = (rows, T - 1)
    mask = torch.rand(size, generator=draw) > 0.3
    mask[:, -1] = True
    return {
        "ids": torch.randint(1, VOCAB, (rows, T), generator=draw),
        "mask": mask,
        "old": torch.randn(size, generator=draw, dtype=torch.float64) - 3,
        "adv": torch.randn(size, generator=draw, dtype=torch.float64),
        "lengths": torch.tensor([9, 11, 7]),
        "top": torch.rand(*size, VOCAB, generator=draw).argsort(-1)[..., :4],
        "top_logps": torch.randn(*size, 4, generator=draw, dtype=torch.float64).log_softmax(-1) - 1,
    }


def picked(x, ids):
    return x.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def weighed(values, b):
    return -(values * b["adv"])[b["mask"]].sum() / b["mask"].sum()


def shifted(m, b):
    return m(b["ids"])[:, :-1], b["ids"][:, 1:]


# ---------------------------------------------------------------- bounded memory
@shape
def divided_in_place_row_by_row(m, b):
    """One row of tokens after another, after a write into a view of packed logits."""
    logits = m(b["ids"][:1])[0, :-1]
    logits.div_(0.7)
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    return -((picked(logits, b["ids"][0, 1:]) - lse) * b["adv"][0]).sum()


@shape
def chunks_of_rows_into_a_buffer(m, b):
    logits, ids = shifted(m, b)
    flat, lse = logits.reshape(-1, VOCAB), logits.new_zeros(logits[..., 0].numel())
    for start in range(0, len(flat), 7):
        lse[start : start + 7] = flat[start : start + 7].logsumexp(-1)
    return weighed(picked(logits, ids) - lse.view(ids.shape), b)


@shape
def chunks_of_columns_into_a_buffer(m, b):
    logits, ids = shifted(m, b)
    entropy = torch.zeros_like(b["adv"])
    for s in range(0, ids.size(1), 3):
        part = logits[:, s : s + 3].log_softmax(-1)
        entropy[:, s : s + 3] = -(part.exp() * part).sum(-1) * b["mask"][:, s : s + 3]
    return weighed(picked(logits.log_softmax(-1), ids) + 0.1 * entropy, b)


@shape
def several_candidates_in_chunks(m, b):
    logits, _ = shifted(m, b)
    flat, top = logits.reshape(-1, VOCAB), b["top"].reshape(-1, 4)
    out = logits.new_empty(len(flat), 4)
    for s in range(0, len(flat), 7):
        part = flat[s : s + 7]
        out[s : s + 7] = part.gather(-1, top[s : s + 7]) - part.logsumexp(-1, keepdim=True)
    kl = b["top_logps"].exp() * (b["top_logps"] - out.view(b["top"].shape))
    return (kl.sum(-1) * b["mask"]).sum()


@shape
def lists_of_parts_per_sequence(m, b):
    logits = m(b["ids"].view(1, -1)).squeeze(0) / 0.9
    parts, ids = logits.split([9, 11, 7]), b["ids"].flatten().split([9, 11, 7])
    means = []
    for part, target in zip(parts, ids, strict=True):
        logps = picked(part[:-1].log_softmax(-1), target[1:])
        means.append(((logps - logps.detach()).exp() * logps.detach()).mean().expand_as(logps))
    return torch.cat(means).mean()


# ---------------------------------------------------------------- parts of the vocabulary
@shape
def vocabulary_in_parts(m, b):
    logits, ids = shifted(m, b)
    lse = torch.stack([part.logsumexp(-1) for part in logits.split(7, -1)]).logsumexp(0)
    return weighed(picked(logits, ids) - lse, b)


@shape
def in_place_as_for_a_shard(m, b):
    """Maximum taken off in place, targets of other shards masked, sums of exponentials."""
    logits, ids = shifted(m, b)
    logits = logits.clone()
    logits -= logits.detach().amax(-1, keepdim=True)
    away = (ids < 0) | (ids >= VOCAB)
    local = (ids - 0).masked_fill(away, 0)
    rows = torch.arange(ids.numel())
    found = logits.view(-1, VOCAB)[rows, local.flatten()].clone().view_as(ids)
    found = found.masked_fill(away, 0.0)
    return weighed(found - logits.exp().sum(-1).log(), b)


@shape
def nucleus_by_sort_and_scatter(m, b):
    logits, ids = shifted(m, b)
    ordered, order = logits.sort(-1)
    cut = ordered.softmax(-1).cumsum(-1) <= 0.2
    cut[..., -1] = False
    kept = ordered.masked_fill(cut, -float("inf"))
    logps = picked(torch.empty_like(kept).scatter(-1, order, kept).log_softmax(-1), ids)
    return weighed(torch.where(logps.isinf(), 0.0, logps), b)


@shape
def nucleus_in_chunks_of_rows(m, b):
    """Filtered logits of a chunk at a time, written into a buffer of all."""
    logits, ids = shifted(m, b)
    flat = logits.reshape(-1, VOCAB)
    out = torch.empty_like(flat)
    for s in range(0, len(flat), 7):
        ordered, order = flat[s : s + 7].sort(-1)
        cut = ordered.softmax(-1).cumsum(-1) <= 0.2
        kept = ordered.masked_fill(cut, -1e9)
        out[s : s + 7] = kept.scatter(-1, order, kept)
    return weighed(picked(out.view_as(logits).log_softmax(-1), ids).clamp(min=-50), b)


@shape
def top_k_by_threshold_in_place(m, b):
    logits, ids = shifted(m, b)
    logits = logits.clone()
    logits.masked_fill_(logits < logits.topk(5, -1).values[..., -1:], -1e9)
    return weighed(picked(logits.log_softmax(-1), ids).clamp(min=-50), b)


@shape
def tail_of_the_candidates(m, b):
    logits, _ = shifted(m, b)
    logps = logits.gather(-1, b["top"]) - logits.logsumexp(-1, keepdim=True)
    tail = torch.log1p(-logps.logsumexp(-1, keepdim=True).clamp(max=-1e-6).exp())
    mine = torch.cat([logps, tail], -1)
    rest = torch.log1p(-b["top_logps"].logsumexp(-1, keepdim=True).exp())
    theirs = torch.cat([b["top_logps"], rest], -1)
    return (F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1) * b["mask"]).sum()


# ---------------------------------------------------------------- several models
@shape
def mixture_divergence_of_chosen_tokens(m, b):
    mine = shifted(m, b)[0].log_softmax(-1)
    with torch.no_grad():
        other = m(b["ids"].flip(0))[:, :-1].div(1.3).log_softmax(-1)
    mixed = torch.logsumexp(torch.stack([mine + math.log(0.4), other + math.log(0.6)]), 0)
    kl = [F.kl_div(mixed, x, reduction="none", log_target=True) for x in (mine, other)]
    return (0.4 * kl[0] + 0.6 * kl[1]).sum(-1)[b["mask"]].mean()


@shape
def masked_products_of_probabilities(m, b):
    logits, _ = shifted(m, b)
    with torch.no_grad():
        other = m(b["ids"].flip(0))[:, :-1].softmax(-1)
    infinite = torch.isinf(logits)
    terms = torch.masked_fill(other * logits.log_softmax(-1), infinite, 0)
    return -(terms.sum(-1).view(-1) * b["mask"].view(-1)).sum() / b["mask"].sum()


# ---------------------------------------------------------------- masks, metrics, packing
@shape
def rows_selected_before_the_loss(m, b):
    logits, ids = shifted(m, b)
    return F.cross_entropy(logits[b["mask"]] / 0.9, ids[b["mask"]], label_smoothing=0.1)


@shape
def rows_gathered(m, b):
    """As trlx picks the rows of actions: one position for all of a row's columns."""
    logits, ids = shifted(m, b)
    at = b["top"][:, :5, 0] % ids.size(1)
    logits = logits.gather(1, at.unsqueeze(-1).expand(-1, -1, VOCAB))
    every = torch.arange(5)[None, :, None].repeat(len(ids), 1, VOCAB)
    logits = logits.gather(1, every)
    return weighed(
        picked(logits.log_softmax(-1), ids.gather(1, at)),
        {name: b[name].gather(1, at) for name in ("adv", "mask")},
    )


@shape
def selected_rows_counted(m, b):
    logits, ids = (x[b["mask"]] for x in shifted(m, b))
    return F.cross_entropy(logits, ids, reduction="sum") / max(logits.shape[0], 1)


@shape
def unpadded_and_padded_again(m, b):
    at = b["mask"].flatten().nonzero().flatten()
    logits, ids = shifted(m, b)
    logps = picked(logits.reshape(-1, VOCAB)[at].log_softmax(-1), ids.flatten()[at])
    full = logps.new_zeros(ids.numel()).index_put((at,), logps)
    return weighed(full.view(ids.shape), b)


@shape
def unpadded_ids_rolled(m, b):
    at = (b["ids"] > 3).flatten().nonzero().flatten()
    ids = b["ids"].flatten()[at]
    logps = m.head(m.hidden(b["ids"]).flatten(0, 1)[at]).log_softmax(-1)
    back = picked(logps, torch.roll(ids[None], shifts=(-1, 2), dims=(1, 0))[0])
    return -(
        back + picked(logps, ids.roll(-1)) + picked(logps, ids.view(-1, 1).roll(99)[:, 0])
    ).sum()


def tokens_of_high_entropy(m, b):
    logits, ids = shifted(m, b)
    with torch.no_grad():
        logps = logits.log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        high = (entropy >= torch.quantile(entropy[b["mask"]], 0.5)) & b["mask"]
    return -(picked(logits.log_softmax(-1), ids) * b["adv"] * high).sum()


if torch.__version__ >= "2.13":  # before, torch.quantile takes no size that varies: a miss says so
    shape(tokens_of_high_entropy)


@shape
def labels_shifted_by_a_buffer(m, b):
    labels = torch.full_like(b["ids"], -100)
    labels[:, :-1] = b["ids"][:, 1:].masked_fill(~b["mask"], -100)
    logps = m(b["ids"]).log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    segments = torch.arange(T) // 4
    sums = logps.new_zeros(B, 3).scatter_add(1, segments.expand(B, -1), logps * (labels != -100))
    return -F.logsigmoid(sums[:, 0] - sums[:, 1]).mean()


@shape
def statistics_beside_the_loss(m, b):
    logits, ids = shifted(m, b)
    logits = logits / 0.8
    logps = picked(logits, ids) - logits.logsumexp(-1)
    with torch.no_grad():
        probs = logits.softmax(-1)
        entropy = logits.logsumexp(-1) - (probs * logits).sum(-1)
        squares = probs.square().sum(-1)
        hits = (logits.argmax(-1) == ids) & b["mask"]
    weights = 1 + entropy + squares + hits
    return weighed(torch.clamp((logps - b["old"]).exp(), max=5.0).detach() * logps * weights, b)


# ---------------------------------------------------------------- sequences as long as data says
def packed(m, b):
    return m(b["ids"].view(1, -1)).squeeze(0), b["ids"].flatten()


@shape
def parts_as_long_as_a_list_read_off_a_tensor(m, b):
    logits, ids = packed(m, b)
    lengths = b["lengths"].tolist()
    loss = 0.0
    for part, target in zip(logits.split(lengths), ids.split(lengths), strict=True):
        loss = loss - picked(part[:-1].log_softmax(-1), target[1:]).sum()
    return loss


@shape
def responses_between_cumulative_lengths(m, b):
    logits, ids = packed(m, b)
    ends = b["lengths"].cumsum(0).tolist()
    means = []
    for start, end in zip([0, *ends], ends, strict=False):
        means.append(picked(logits[start : end - 1].log_softmax(-1), ids[start + 1 : end]).sum())
    return -torch.stack(means).mean()


@shape
def rows_of_a_batch_of_one(m, b):
    logits, ids = m(b["ids"].view(1, -1))[:, :-1], b["ids"].view(1, -1)[:, 1:]
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    return -(picked(logits, ids) - lse).mean()


@shape
def padding_taken_out_by_a_mask(m, b):
    """Then one token after another, as many as the mask has."""
    real = F.pad(b["mask"], (1, 0), value=True)
    ids = b["ids"][real]
    logits = m(ids.unsqueeze(0)).squeeze(0)
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    logps = torch.zeros(real.shape, dtype=lse.dtype)
    logps[real] = picked(logits, ids.roll(-1)) - lse
    return weighed(logps[:, 1:], b)


@shape
def a_head_for_each_codebook(m, b):
    """In one batched product, as audio models have them."""
    hidden, ids = m.hidden(b["ids"])[:, :-1], b["ids"][:, 1:]
    rows = torch.stack([hidden, hidden.tanh()]).flatten(1, 2)
    heads = torch.stack([m.head.weight.t(), -m.head.weight.t()])
    logits = torch.bmm(rows, heads).view(2, *ids.shape, VOCAB)
    logps = logits.log_softmax(-1).gather(-1, ids.expand(2, -1, -1)[..., None])[..., 0]
    return weighed(logps.sum(0), b)


class Sharper:
    def __call__(self, ids, scores):
        return scores * 1.5


class Processors(list):
    """As transformers' list of processors: it asks each what it takes."""

    def __call__(self, ids, scores):
        for one in self:
            given = ids, scores
            scores = one(*given[: len(inspect.signature(one.__call__).parameters)])
        return scores


@shape
def processed_before_the_loss(m, b):
    logits, ids = shifted(m, b)
    logits = Processors([Sharper()])(ids, logits)
    return weighed(picked(logits, ids) - logits.logsumexp(-1), b)


@shape
def sizes_marked_in_the_loss(m, b):
    torch._dynamo.mark_dynamic(b["ids"], 1)
    logits, ids = shifted(m, b)
    torch._dynamo.maybe_mark_dynamic(logits, 1)
    return weighed(picked(logits, ids) - logits.logsumexp(-1), b)


# ---------------------------------------------------------------- beside the loss
@shape
def hits_among_labels_of_which_some_are_no_token(m, b):
    logits, ids = m(b["ids"]), b["ids"][:, 1:]
    labels = F.pad(ids.masked_fill(~b["mask"], -100), (0, 1), value=-100)
    with torch.no_grad():  # of other rows than the loss, so heads of their own
        hits = logits[:, :-1].argmax(-1) == labels[:, :-1]
    weight = 1 + hits.sum() / (labels != -100).sum()
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) * weight


@shape
def mixture_of_given_and_own_distributions(m, b):
    logits, _ = shifted(m, b)
    given = torch.stack([b["old"] * k for k in torch.linspace(0.5, 1.5, VOCAB)], -1).log_softmax(-1)
    own, half = logits.log_softmax(-1), math.log(0.5)
    mixed = torch.logsumexp(torch.stack([own + half, given + half]), 0)
    parts = (F.kl_div(mixed, one, reduction="none", log_target=True) for one in (own, given))
    return (sum(parts).sum(-1) * b["mask"]).sum() / b["mask"].sum()


#: Each op, remark and branch of fxrl in them is another shape's, too.
SELDOM = (
    "chunks_of_columns_into_a_buffer",
    "in_place_as_for_a_shard",
    "labels_shifted_by_a_buffer",
    "mixture_divergence_of_chosen_tokens",
    "nucleus_by_sort_and_scatter",
    "rows_selected_before_the_loss",
    "parts_as_long_as_a_list_read_off_a_tensor",
    "responses_between_cumulative_lengths",
    "top_k_by_threshold_in_place",
    "chunks_of_rows_into_a_buffer",
    "lists_of_parts_per_sequence",
    "masked_products_of_probabilities",
    "selected_rows_counted",
)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", rows(SHAPES, SELDOM))
def test_shape(name):
    loss_fn = SHAPES[name]
    batches = sized(loss_fn, batch)()
    torch.manual_seed(0)
    model = Model().double()
    step = optimize(model, loss_fn, CONFIG)
    found, wanted = step(batches), loss_fn(model, batches)
    parameters = list(model.parameters())
    pairs = [torch.autograd.grad(loss, parameters) for loss in (found, wanted)]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-11)
    applied = {remark.pass_name for remark in step.report.of_kind("applied")}
    missed = {remark.pass_name for remark in step.report.of_kind("missed")}
    assert applied & HEADS, step.report
    assert "chunk-vocab-region" not in missed, "after fuse-linear-logprob no logits are left"
    assert not open_misses(step.report)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("lengths", "missed"), [([9, 18, 0], True), ([9, 17, 1], False)])
def test_an_empty_sequence_has_the_numbers_of_eager(lengths, missed):
    """What is captured of sequences with a token to leave out is not run for one without."""
    loss_fn = parts_as_long_as_a_list_read_off_a_tensor
    torch.manual_seed(0)
    model, given = Model().double(), batch()
    step = optimize(model, loss_fn, replace(CONFIG, on_miss="ignore"))
    step(given)
    given["lengths"] = torch.tensor(lengths)
    torch.testing.assert_close(step(given), loss_fn(model, given), rtol=1e-11, atol=1e-11)
    reasons = [miss.reason for miss in open_misses(step.report)]
    assert any("a check failed" in reason for reason in reasons) == missed
