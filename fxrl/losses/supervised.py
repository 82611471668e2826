"""The losses without rewards: supervised fine-tuning, distillation, preferences (DPO, KTO, and
reward models of these).

Shapes: B sequences (or pairs), T tokens, C completion tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxrl.dtypes import at_least_float32
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
from fxrl.losses.logprobs import completion_logits, entropy_of, token_stats
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
REWARD_METRICS = frozenset(name for name in PREFERENCE_METRICS if name.startswith("rewards/"))
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
        tokens, mask = _learned(batch)
        logits = _predicting(model, batch, mask)
        stats = token_stats(logits, tokens, entropy="log" if log_entropy else "none")
        metrics: Metrics = {}
        if stats.entropy is not None:
            metrics["entropy"] = masked_mean(stats.entropy, mask)
        if log_accuracy:
            hits = (logits.detach().argmax(-1) == tokens).to(stats.logps.dtype)
            metrics["mean_token_accuracy"] = masked_mean(hits, mask)
        return token_mean_of_update(-stats.logps, mask, batch), metrics

    return loss_fn


def _learned(batch: Batch) -> tuple[Tensor, Tensor]:
    """The last C tokens, and which of them are learned: int64 and bool, [B, C]."""
    if "labels" in batch:
        labels = batch["labels"][:, 1:]
        mask = labels != IGNORE_INDEX
        return torch.where(mask, labels, 0), mask
    need(batch, "completion_mask", "says what to learn, as does 'labels'")
    mask = completion_mask(batch)
    return batch["input_ids"][:, -mask.shape[1] :], mask


def _predicting(model: nn.Module, batch: Batch, mask: Tensor) -> Tensor:
    """Logits [B, C, V] that predict the tokens of ``_learned``."""
    if "labels" in batch:
        logits: Tensor = model(**model_inputs(batch)).logits[:, :-1]
        return logits
    return completion_logits(model, batch, mask.shape[1])[0]


@loss_factory
def distill(
    teacher: nn.Module | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    log_entropy: bool = True,
) -> LossFn:
    """Distillation: the divergence from a teacher's whole distribution of each token.

        p = softmax(teacher's logits / temperature),  q = softmax(model's logits / temperature)
        beta = 0:   L = mean_t KL(p_t || q_t)        forward: q covers p
        beta = 1:   L = mean_t KL(q_t || p_t)        reverse: q seeks a mode of p
        between:    L = mean_t [ beta KL(p_t || m_t) + (1 - beta) KL(q_t || m_t) ]
                    m = beta p + (1 - beta) q         generalized Jensen-Shannon divergence

    over the tokens that count, in the batch of ``sft``, whoever they are from: given answers, the
    teacher's, the model's own. Both models have one vocabulary; where one's head has more rows
    (padding), only those that both have count.

    Sources: Hinton et al., Distilling the knowledge in a neural network, arXiv:1503.02531 (their
    factor temperature^2 is left to the learning rate); generalized knowledge distillation,
    arXiv:2306.13649, whose beta this is.

    Args:
        teacher: a causal LM, which gets no gradient. It runs in the step, so that neither model's
            logits need ever be whole; its mode (train, eval) is left as it is.
        log_entropy: report ``entropy`` and ``teacher_entropy``, means in nats, at ``temperature``.

    Raises:
        LossConfigError: a value is out of range.
        BatchError: (on call) there is no teacher.
    """
    check_positive("beta", beta, or_zero=True)
    check_positive("temperature", temperature)
    check_flag("log_entropy", log_entropy)
    if beta > 1.0:
        raise LossConfigError(f"beta={beta} must be in [0, 1]: 0 is KL(teacher || model)")
    if not isinstance(teacher, nn.Module | None):
        raise LossConfigError(f"teacher={teacher!r} is no model; give the module itself")

    @tells(LossInfo("update", reads="sequences", reference=False))
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        if teacher is None:
            raise BatchError("distill has no teacher; give one: fxrl.losses.distill(teacher)")
        _, mask = _learned(batch)
        with torch.no_grad():
            theirs = _predicting(teacher, batch, mask)
        logits = _predicting(model, batch, mask)
        size = min(logits.shape[-1], theirs.shape[-1])
        own_logps, their_logps = (
            torch.log_softmax(at_least_float32(given[..., :size]) / temperature, dim=-1)
            for given in (logits, theirs)
        )
        metrics: Metrics = {}
        if log_entropy:
            metrics["entropy"] = masked_mean(entropy_of(own_logps.detach()), mask)
            metrics["teacher_entropy"] = masked_mean(entropy_of(their_logps), mask)
        divergence = _divergence(own_logps, their_logps, beta)
        return token_mean_of_update(divergence, mask, batch), metrics

    return loss_fn


def _divergence(own_logps: Tensor, their_logps: Tensor, beta: float) -> Tensor:
    """The divergence of ``distill`` per token: log-probs [B, C, V], twice -> [B, C]."""
    if beta == 0.0:
        return _kl(their_logps, own_logps)
    if beta == 1.0:
        return _kl(own_logps, their_logps)
    mixture = torch.logaddexp(own_logps + math.log1p(-beta), their_logps + math.log(beta))
    return beta * _kl(their_logps, mixture) + (1.0 - beta) * _kl(own_logps, mixture)


def _kl(p_logps: Tensor, q_logps: Tensor) -> Tensor:
    """KL(p || q)."""
    return (p_logps.exp() * (p_logps - q_logps)).sum(-1)


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
        _check_pairs("dpo", mask.shape[0])
        why = "" if reference_free else "dpo compares with; reference_free=True goes without"
        logps, rewards = _sequence_logps(model, batch, mask, reduce_tokens, why)  # [2B] each
        chosen, rejected = _pairs(rewards)
        losses = _preference_losses(chosen - rejected, beta, loss_type, label_smoothing)
        return losses.mean(), _preference_metrics(beta * rewards, logps)

    return loss_fn


@loss_factory
def reward_model(center_rewards_coefficient: float = 0.0) -> LossFn:
    """Reward modelling: a scalar for each answer, by the Bradley-Terry model of preferences.

        L = mean( -log sigmoid(r+ - r-) + c (r+ + r-)^2 )

    c = ``center_rewards_coefficient``. The batch has 2B sequences: B chosen, then their B rejected.
    The model's ``.logits`` are their rewards, [2B, 1] (Hugging Face's sequence classifiers with one
    label, which read them at the last token that is not ``config.pad_token_id``).

    Sources: arXiv:2203.02155 eq. 1; rewards of mean 0: arXiv:2312.09244 eq. 2.

    Args:
        center_rewards_coefficient: weight of the squared sums, which keep rewards around 0.

    Raises:
        LossConfigError: a value is out of range.
        BatchError: (on call) an odd number of sequences, or not one reward each.
    """
    check_positive("center_rewards_coefficient", center_rewards_coefficient, or_zero=True)

    @tells(LossInfo("sequences", REWARD_METRICS, reads="pairs", reference=False, scalar_head=True))
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        logits = at_least_float32(model(**model_inputs(batch)).logits)
        if logits.dim() != 2 or logits.shape[1] != 1:
            raise BatchError(
                f"reward_model needs one reward a sequence, not logits of {list(logits.shape)}; "
                "take a sequence classifier with num_labels=1"
            )
        _check_pairs("reward_model", batch["input_ids"].shape[0])
        chosen, rejected = _pairs(logits.squeeze(-1))
        losses = -F.logsigmoid(chosen - rejected)
        if center_rewards_coefficient:
            losses = losses + center_rewards_coefficient * (chosen + rejected).square()
        return losses.mean(), _reward_metrics(chosen.detach(), rejected.detach())

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
    """log pi(y | x) of each sequence [B], reduced by ``reduce_tokens(logps [B, C], mask)``, and its
    excess over the reference's. ``why`` says what ``ref_logps`` are needed for; if empty they may
    be missing, and count as 0."""
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


def _check_pairs(name: str, rows: int) -> None:
    if rows % 2:
        raise BatchError(
            f"{name} needs pairs, chosen then rejected, not {rows} rows; give an even number"
        )


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
    return _reward_metrics(chosen, rejected) | {
        "logps/chosen": chosen_logps.mean(),
        "logps/rejected": rejected_logps.mean(),
    }


def _reward_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
        "rewards/margins": (chosen - rejected).mean(),
    }
