"""Losses without rewards against loops over tokens; gradients by finite differences."""

import math

import pytest
import torch
from loss_models import VOCAB, FreeLogits, Output, random_batch

from fxrl import losses


def log_prob(row, token):
    return float(row[token]) - math.log(sum(math.exp(float(z)) for z in row))


def check_gradient(loss_fn, logits, batch):
    """Autograd against central differences of the loss itself."""
    assert torch.autograd.gradcheck(lambda z: _call(loss_fn, z, batch), logits.requires_grad_())


def _call(loss_fn, logits, batch):
    model = FreeLogits(logits.detach())
    del model.logits
    model.logits = logits
    return loss_fn(model, batch)[0]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("total", [None, 21])
def test_sft(labels, total):
    batch, logits = random_batch(seed=1)
    ids, mask = batch["input_ids"], batch["completion_mask"]
    counted = torch.cat([torch.zeros(3, 3), mask], 1).bool()
    if labels:
        batch["labels"] = torch.where(counted, ids, -100)
        del batch["completion_mask"]
    if total:
        batch["num_items_in_batch"] = total
    terms, hits = [], []
    for b, t in counted.nonzero().tolist():
        row = logits[b, t - 1]
        terms.append(-log_prob(row, ids[b, t]))
        hits.append(float(row[ids[b, t]] == row.max()))
    loss, metrics = losses.sft()(FreeLogits(logits), batch)
    torch.testing.assert_close(loss.item(), sum(terms) / (total or len(terms)))
    assert metrics["mean_token_accuracy"].item() == pytest.approx(sum(hits) / len(hits))
    assert 0 < metrics["entropy"] <= math.log(VOCAB)
    check_gradient(losses.sft(), logits, batch)


def test_sft_is_hugging_face_cross_entropy():
    batch, logits = random_batch(seed=2)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, :4] = -100
    flat = logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1)
    expected = torch.nn.functional.cross_entropy(*flat, ignore_index=-100)
    torch.testing.assert_close(losses.sft()(FreeLogits(logits), batch)[0], expected)


def divergence(p, q, beta):
    """By the definition, of plain lists."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if beta in (0.0, 1.0):
        return kl(p, q) if beta == 0.0 else kl(q, p)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def probabilities(row, temperature):
    powers = [math.exp(float(z) / temperature) for z in row]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (1.0, 0.7), (0.3, 2.0)])
@pytest.mark.parametrize("wider", [-2, 0, 3])
def test_distill(labels, beta, temperature, wider):
    """The teacher's head has more rows than the model's, as many, or fewer."""
    batch, logits = random_batch(seed=6)
    theirs = torch.randn(3, 7, VOCAB + wider, dtype=torch.float64)
    mask = batch["completion_mask"]
    counted = torch.cat([torch.zeros(3, 3), mask], 1).bool()
    if labels:
        batch["labels"] = torch.where(counted, batch["input_ids"], -100)
        del batch["completion_mask"]
    size = VOCAB + min(wider, 0)
    terms, entropies = [], []
    for b, t in counted.nonzero().tolist():
        p = probabilities(theirs[b, t - 1, :size], temperature)
        terms.append(divergence(p, probabilities(logits[b, t - 1, :size], temperature), beta))
        entropies.append(-sum(x * math.log(x) for x in p))
    teacher = FreeLogits(theirs)
    loss_fn = losses.distill(teacher, beta, temperature)
    loss, metrics = loss_fn(FreeLogits(logits), batch)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)
    assert metrics["teacher_entropy"].item() == pytest.approx(sum(entropies) / len(entropies))
    check_gradient(loss_fn, logits, batch)
    assert teacher.logits.grad is None
    itself = losses.distill(FreeLogits(logits), beta, temperature)(FreeLogits(logits), batch)[0]
    assert itself.item() == pytest.approx(0.0, abs=1e-12)


def test_distill_without_a_teacher_says_so():
    batch, logits = random_batch()
    with pytest.raises(losses.BatchError, match="no teacher; give one"):
        losses.distill()(FreeLogits(logits), batch)


def preference(h, beta, kind, eps):
    if kind == "hinge":
        return max(0.0, 1 - beta * h)
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    win = 1 / (1 + math.exp(-beta * h))
    return -(1 - eps) * math.log(win) - eps * math.log(1 - win)


@pytest.mark.parametrize(
    ("kind", "eps"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]
)
@pytest.mark.parametrize("reference", ["tokens", "sequences", "free"])
def test_dpo(kind, eps, reference):
    batch, logits = random_batch(seed=4, batch=4, spread=2.0)
    mask, ids = batch["completion_mask"], batch["input_ids"]
    scores, refs = [], []
    for b in range(4):
        kept = [t for t in range(4) if mask[b, t]]
        share = 1 / len(kept) if kind == "ipo" else 1.0
        scores.append(share * sum(log_prob(logits[b, 2 + t], ids[b, 3 + t]) for t in kept))
        refs.append(share * sum(float(batch["ref_logps"][b, t]) for t in kept))
    if reference == "sequences":
        batch["ref_logps"] = torch.tensor(refs, dtype=torch.float64)
    if reference == "free":
        del batch["ref_logps"]
        refs = [0.0] * 4
    rewards = [s - r for s, r in zip(scores, refs, strict=True)]
    expected = sum(preference(rewards[i] - rewards[i + 2], 0.3, kind, eps) for i in (0, 1)) / 2
    loss_fn = losses.dpo(0.3, kind, eps, reference_free=reference == "free")
    loss, metrics = loss_fn(FreeLogits(logits), batch)
    torch.testing.assert_close(loss.item(), expected)
    assert metrics["rewards/chosen"].item() == pytest.approx(0.3 * (rewards[0] + rewards[1]) / 2)
    margin = 0.3 * (rewards[0] + rewards[1] - rewards[2] - rewards[3]) / 2
    assert metrics["rewards/margins"].item() == pytest.approx(margin)
    wins = [rewards[i] > rewards[i + 2] for i in (0, 1)]
    assert metrics["rewards/accuracies"].item() == sum(wins) / 2
    check_gradient(loss_fn, logits, batch)


def test_dpo_at_the_reference_is_log_two():
    batch, logits = random_batch(seed=4, batch=2, spread=0.0)
    loss, _ = losses.dpo()(FreeLogits(logits), batch)
    assert loss.item() == pytest.approx(math.log(2))


def test_dpo_needs_pairs_and_a_reference():
    batch, logits = random_batch(batch=3)
    with pytest.raises(losses.BatchError, match="3 rows"):
        losses.dpo()(FreeLogits(logits), batch)
    batch, logits = random_batch(batch=2)
    del batch["ref_logps"]
    with pytest.raises(losses.BatchError, match=r"no 'ref_logps'.*reference_free=True"):
        losses.dpo()(FreeLogits(logits), batch)


@pytest.mark.parametrize(
    "kw", [{"beta": 0}, {"loss_type": "hing"}, {"label_smoothing": 0.5}, {"beta": -1.0}]
)
def test_dpo_refuses(kw):
    with pytest.raises(losses.LossConfigError, match=next(iter(kw))):
        losses.dpo(**kw)


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_reward_model(center):
    batch, _ = random_batch(batch=4)
    rewards = [0.4, -1.2, 0.9, 0.1]

    def scores(values):
        return lambda input_ids, **_: Output(logits=values[:, None])

    loss_fn = losses.reward_model(center)
    values = torch.tensor(rewards, dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_fn(scores(values), batch)
    expected = 0.0
    for plus, minus in ((0.4, 0.9), (-1.2, 0.1)):
        expected += math.log(1 + math.exp(minus - plus)) + center * (plus + minus) ** 2
    assert loss.item() == pytest.approx(expected / 2, rel=1e-12)
    assert metrics["rewards/margins"].item() == pytest.approx(-0.9)
    assert metrics["rewards/accuracies"] == 0.0
    assert torch.autograd.gradcheck(lambda v: loss_fn(scores(v), batch)[0], values)


def test_reward_model_needs_one_reward_for_each_row_of_pairs():
    batch, logits = random_batch(batch=4)
    with pytest.raises(losses.BatchError, match=r"not logits of \[4, 7, 7\]; take a sequence cla"):
        losses.reward_model()(FreeLogits(logits), batch)
    batch, logits = random_batch(batch=3)
    with pytest.raises(losses.BatchError, match="chosen then rejected, not 3 rows; give an even"):
        losses.reward_model()(FreeLogits(logits[:, 0, :1]), batch)


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_kto(kind, per_sequence):
    batch, logits = random_batch(seed=5, batch=5, spread=2.0)
    mask, ids, z = batch["completion_mask"], batch["input_ids"], float(batch["kl"])
    batch["desirable"] = torch.tensor([1, 0, 0, 1, 1])
    gaps, refs = [], []
    for b in range(5):
        kept = [t for t in range(4) if mask[b, t]]
        refs.append(sum(float(batch["ref_logps"][b, t]) for t in kept))
        gaps.append(sum(log_prob(logits[b, 2 + t], ids[b, 3 + t]) for t in kept) - refs[-1])
    if per_sequence:
        batch["ref_logps"] = torch.tensor(refs, dtype=torch.float64)
    if kind == "apo_zero_unpaired":
        z = 0.0
        del batch["kl"]
    good = [0, 3, 4]
    terms = [
        1.5 / (1 + math.exp(0.3 * (r - z))) if b in good else 0.5 / (1 + math.exp(0.3 * (z - r)))
        for b, r in enumerate(gaps)
    ]
    loss_fn = losses.kto(0.3, kind, desirable_weight=1.5, undesirable_weight=0.5)
    loss, metrics = loss_fn(FreeLogits(logits), batch)
    torch.testing.assert_close(loss.item(), sum(terms) / 5)
    chosen, rejected = 0.1 * sum(gaps[b] for b in good), 0.15 * (gaps[1] + gaps[2])
    assert metrics["rewards/chosen"].item() == pytest.approx(chosen)
    assert metrics["rewards/rejected"].item() == pytest.approx(rejected)
    assert metrics["rewards/margins"].item() == pytest.approx(chosen - rejected)
    assert ("kl" in metrics) == (kind == "kto")
    check_gradient(loss_fn, logits, batch)


@pytest.mark.parametrize("key", ["ref_logps", "desirable", "kl"])
def test_kto_says_what_it_lacks(key):
    batch, logits = random_batch()
    del batch[key]
    with pytest.raises(losses.BatchError, match=f"no '{key}'"):
        losses.kto()(FreeLogits(logits), batch)
