"""The losses without rewards: supervised fine-tuning, and preferences (DPO, KTO).

Shapes: B sequences (or pairs), T tokens, C completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxrl.losses.batch import (
    Batch,
    BatchError,
    LossConfigError,
    LossFn,
    Metrics,
    check_choice,
    check_flag,
    check_number,
    check_positive,
    completion_mask,
    model_inputs,
    need,
    per_token,
)
from fxrl.losses.logprobs import completion_logits, token_stats
from fxrl.losses.options import LossInfo, loss_factory, tells
from fxrl.losses.reduce import masked_mean, masked_sum, row_mean, token_mean_of_update

IGNORE_INDEX = -100
PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]
PREFERENCE_METRICS = frozenset(
    {
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
        *("logps/chosen", "logps/rejected"),
    }
)
KTO_METRICS = PREFERENCE_METRICS - {"rewards/accuracies"} | {"kl"}
"""Means over sequences."""


@loss_factory
def sft(*, log_entropy: bool = True, log_accuracy: bool = True) -> LossFn:
    """Next-token cross-entropy.

        L = -sum_t log pi(x_t | x_<t) / N

    over the tokens whose label counts; N = ``batch["num_items_in_batch"]``, else their number.
    The batch has ``labels`` [B, T] (-100 is ignored), or ``completion_mask`` [B, C].

    Args:
        log_entropy: report ``entropy``, the mean entropy of the predictions in nats.
        log_accuracy: report ``mean_token_accuracy``, the share of tokens that are the argmax.
    """

    check_flag("log_entropy", log_entropy)
    check_flag("log_accuracy", log_accuracy)

    @tells(LossInfo("update", reads="sequences", reference=False))
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        if "labels" in batch:
            labels = batch["labels"][:, 1:]
            mask = labels != IGNORE_INDEX
            logits = model(**model_inputs(batch)).logits[:, :-1]
            tokens = torch.where(mask, labels, 0)
        else:
            why = "says what to learn, as does 'labels'"
            tokens = batch["input_ids"][:, -need(batch, "completion_mask", why).shape[1] :]
            mask = completion_mask(batch)
            logits, _ = completion_logits(model, batch, mask.shape[1])
        stats = token_stats(logits, tokens, entropy="log" if log_entropy else "none")
        metrics: Metrics = {}
        if stats.entropy is not None:
            metrics["entropy"] = masked_mean(stats.entropy, mask)
        if log_accuracy:
            hits = (logits.detach().argmax(-1) == tokens).to(stats.logps.dtype)
            metrics["mean_token_accuracy"] = masked_mean(hits, mask)
        return token_mean_of_update(-stats.logps, mask, batch), metrics

    return loss_fn


@loss_factory
def dpo(
    beta: float = 0.1,
    loss_type: PreferenceLoss = "sigmoid",
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> LossFn:
    """Direct preference optimization.

        h = [log pi(y+) - log pi_ref(y+)] - [log pi(y-) - log pi_ref(y-)]
        sigmoid:  L = mean( -(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h) )
        hinge:    L = mean( max(0, 1 - beta h) )
        ipo:      L = mean( (h - 1 / (2 beta))^2 ), log-probs averaged over tokens

    The batch has 2B sequences: B chosen (y+), then their B rejected (y-), with ``completion_mask``
    [2B, C] and ``ref_logps`` [2B, C] per token or [2B] per sequence (summed; for ipo averaged).

    Sources: DPO arXiv:2305.18290 eq. 7; label smoothing (conservative DPO): E. Mitchell, A note
    on DPO with noisy preferences, 2023; hinge arXiv:2305.10425; IPO arXiv:2310.12036.

    Args:
        beta: strength of the pull to the reference.
        label_smoothing: eps, the probability that a preference is the wrong way round.
        reference_free: take log pi_ref as 0; ``ref_logps`` are then not read.

    Raises:
        LossConfigError: a value is out of range.
        BatchError: (on call) an odd number of sequences, or no ``ref_logps``.
    """
    check_positive("beta", beta)
    check_choice("loss_type", loss_type, PreferenceLoss)
    check_number("label_smoothing", label_smoothing)
    check_flag("reference_free", reference_free)
    if not 0.0 <= label_smoothing < 0.5:
        raise LossConfigError(f"label_smoothing={label_smoothing} must be in [0, 0.5)")
    if label_smoothing and loss_type != "sigmoid":
        raise LossConfigError(f"label_smoothing goes with loss_type='sigmoid', not {loss_type!r}")
    reduce_tokens = row_mean if loss_type == "ipo" else masked_sum
    info = LossInfo("sequences", PREFERENCE_METRICS, reads="pairs", reference=not reference_free)

    @tells(info)
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        mask = completion_mask(batch)
        if mask.shape[0] % 2:
            raise BatchError(f"dpo needs pairs, chosen then rejected, not {mask.shape[0]} rows")
        why = "" if reference_free else "dpo compares with; reference_free=True goes without"
        logps, rewards = _sequence_logps(model, batch, mask, reduce_tokens, why)  # [2B] each
        chosen, rejected = _pairs(rewards)
        losses = _preference_losses(chosen - rejected, beta, loss_type, label_smoothing)
        return losses.mean(), _preference_metrics(beta * rewards, logps)

    return loss_fn


@loss_factory
def kto(
    beta: float = 0.1,
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossFn:
    """Kahneman-Tversky optimization: answers that are known to be good or bad, without pairs.

        r_i = log pi(y_i | x_i) - log pi_ref(y_i | x_i)
        desirable:    L_i = desirable_weight (1 - sigmoid(beta (r_i - z)))
        undesirable:  L_i = undesirable_weight (1 - sigmoid(beta (z - r_i)))

    and the mean over sequences; z is an estimate of KL(pi || pi_ref) that has no gradient, and 0
    for ``apo_zero_unpaired``. The batch has ``completion_mask`` [B, C], ``desirable`` [B] (0 is
    not), ``ref_logps`` [B, C] or [B] as for ``dpo``, and for ``kto`` ``kl``, z (0-d).

    ``num_desirable_in_batch`` and ``num_sequences_in_batch`` (0-d), where the batch has them, are
    those of the whole update: the metrics of several batches then add up to its own.

    Sources: KTO arXiv:2402.01306 eq. 7 and 8; APO-zero arXiv:2408.06266 eq. 7.

    Args:
        beta: strength of the pull to the reference.
        desirable_weight, undesirable_weight: make up for other numbers of one than of the other;
            the paper wants their weighted numbers within a factor of 4/3.

    Raises:
        LossConfigError: a value is out of range.
        BatchError: (on call) one of these is not in the batch.
    """
    check_positive("beta", beta)
    check_choice("loss_type", loss_type, Literal["kto", "apo_zero_unpaired"])
    check_positive("desirable_weight", desirable_weight, or_zero=True)
    check_positive("undesirable_weight", undesirable_weight, or_zero=True)
    estimated = loss_type == "kto"

    @tells(
        LossInfo(
            "sequences", KTO_METRICS, reads="labelled", reference=True, mismatched_kl=estimated
        )
    )
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        mask = completion_mask(batch)
        logps, rewards = _sequence_logps(model, batch, mask, masked_sum, "kto compares with")
        desirable = need(batch, "desirable", "says which answers are good") != 0
        gain = rewards
        if estimated:
            gain = rewards - need(batch, "kl", "kto compares rewards with").detach()
        # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where x is large.
        losses = torch.where(
            desirable,
            desirable_weight * torch.sigmoid(-beta * gain),
            undesirable_weight * torch.sigmoid(beta * gain),
        )
        metrics = _labelled_metrics(beta * rewards, logps, desirable, batch)
        if estimated:
            metrics["kl"] = batch["kl"].detach()
        return losses.mean(), metrics

    return loss_fn


def _sequence_logps(
    model: nn.Module,
    batch: Batch,
    mask: Tensor,
    reduce_tokens: Callable[[Tensor, Tensor], Tensor],
    why: str,
) -> tuple[Tensor, Tensor]:
    """log pi(y | x) of each sequence [B], and how far it is above the reference's.

    Args:
        reduce_tokens: of log-probs [B, C] and ``mask``.
        why: ``ref_logps`` are needed; where it is empty they count as 0.
    """
    logits, _ = completion_logits(model, batch, mask.shape[1])
    tokens = batch["input_ids"][:, -mask.shape[1] :]
    logps = reduce_tokens(token_stats(logits, tokens).logps, mask)
    if not why:
        return logps, logps
    given = need(batch, "ref_logps", why)
    ref_logps = given if given.dim() == 1 else reduce_tokens(per_token(given, mask), mask)
    return logps, logps - ref_logps.detach()


def _labelled_metrics(rewards: Tensor, logps: Tensor, desirable: Tensor, batch: Batch) -> Metrics:
    """Means over the desirable and over the others, each times this batch's share of the update's
    sequences over its share of them: so they add up as means over sequences do."""
    rows = torch.ones_like(rewards).sum()
    total = batch.get("num_sequences_in_batch", rows)
    good = batch.get("num_desirable_in_batch", desirable.to(rewards.dtype).sum())
    metrics: Metrics = {}
    for kind, values in (("rewards", rewards.detach()), ("logps", logps.detach())):
        for name, among, number in (
            ("chosen", desirable, good),
            ("rejected", ~desirable, total - good),
        ):
            found = torch.where(among, values, 0.0).sum() / number.clamp(min=1)
            metrics[f"{kind}/{name}"] = found * total / rows
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen half and the rejected half: [2B] -> [B], [B]."""
    chosen, rejected = values.reshape(2, -1).unbind(0)
    return chosen, rejected


def _preference_losses(margin: Tensor, beta: float, loss_type: str, smoothing: float) -> Tensor:
    if loss_type == "hinge":
        return torch.relu(1.0 - beta * margin)
    if loss_type == "ipo":
        return (margin - 1.0 / (2.0 * beta)).square()
    agreed, flipped = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    return -(1.0 - smoothing) * agreed - smoothing * flipped


def _preference_metrics(rewards: Tensor, logps: Tensor) -> Metrics:
    chosen, rejected = _pairs(rewards.detach())
    chosen_logps, rejected_logps = _pairs(logps.detach())
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": chosen_logps.mean(),
        "logps/rejected": rejected_logps.mean(),
    }
