"""The settings that all policy losses share. Names and defaults are those of TRL's GRPOConfig."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypedDict

from fxrl.errors import ConfigError, did_you_mean
from fxrl.losses.advantages import ScaleRewards
from fxrl.losses.batch import BEYOND, FLOAT32_MAX, LossConfigError, LossFn
from fxrl.losses.reduce import Over
from fxrl.options import Check, Options, above, at_least, within

KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Baseline = Literal["group", "leave_one_out"]
Reads = Literal["prompts", "sequences", "pairs", "labelled"]

in_float32 = Check(lambda v: None if abs(v) <= FLOAT32_MAX else BEYOND, {})


class PolicyKeywords(TypedDict, total=False):
    """``PolicyOptions`` as keyword arguments of a loss factory."""

    temperature: float
    beta: float
    kl_estimator: KLEstimator
    use_bias_correction_kl: bool
    entropy_coef: float
    log_entropy: bool
    top_entropy_quantile: float
    off_policy_mask_threshold: float | None
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_mode: CorrectionMode
    vllm_importance_sampling_clip_max: float | None
    vllm_importance_sampling_clip_min: float | None


@dataclass(frozen=True)
class PolicyOptions(Options):
    """Settings of every policy loss.

    Attributes:
        temperature: the logits are divided by it; the one the completions were sampled at.
        beta: coefficient of KL(policy || reference) in the loss; not 0 needs ``ref_logps``.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``, see ``kl_estimate``.
        use_bias_correction_kl: weight each token's KL by its own pi / pi_old, which makes it
            unbiased off-policy (DeepSeek-V3.2, arXiv:2512.02556), at whatever level the loss
            takes its ratio.
        entropy_coef: weight of the entropy bonus, subtracted from the loss: the mean entropy per
            token (of those that ``top_entropy_quantile`` keeps), the same under every loss.
        log_entropy: report ``entropy`` also when there is no bonus (then without gradient).
        top_entropy_quantile: only this share of the tokens, those of highest entropy, carries
            the policy term (arXiv:2506.01939), and the entropy bonus; 1.0 is all. The cut is made
            anew in each batch, so in training it depends on ``micro_batch_tokens``.
        off_policy_mask_threshold: drop a sequence of negative advantage when its mean
            log(pi_rollout / pi) is above this (DeepSeek-V3.2, arXiv:2512.02556); None is off.
        vllm_importance_sampling_correction: weight the policy term by pi_old / pi_rollout where
            the batch has ``rollout_logps`` (whatever engine they came from).
        vllm_importance_sampling_mode: ratio per token or per sequence; truncate it to the
            bounds, or mask (drop) what lies outside.
        vllm_importance_sampling_clip_max: upper bound of that ratio; None is none.
        vllm_importance_sampling_clip_min: lower bound, likewise.
    """

    unfit: ClassVar[type[ConfigError]] = LossConfigError

    temperature: Annotated[float, above(0), in_float32] = 1.0
    beta: Annotated[float, at_least(0), in_float32] = 0.0
    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = True
    entropy_coef: Annotated[float, in_float32] = 0.0
    log_entropy: bool = True
    top_entropy_quantile: Annotated[float, above(0), within(0, 1, "1 takes all tokens")] = 1.0
    off_policy_mask_threshold: Annotated[float, in_float32] | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: CorrectionMode = "sequence_mask"
    vllm_importance_sampling_clip_max: Annotated[float, at_least(0), in_float32] | None = 3.0
    vllm_importance_sampling_clip_min: Annotated[float, at_least(0), in_float32] | None = None

    def problems(self) -> Iterator[str]:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low > high:
            yield f"vllm_importance_sampling_clip_min={low} is above _clip_max={high}; swap them"


@dataclass(frozen=True)
class Critic(Options):
    """How a trainer computes ``advantages`` and ``returns`` from rewards and values (``ppo``)."""

    unfit: ClassVar[type[ConfigError]] = LossConfigError

    # These as in ``advantages.gae``.
    gamma: Annotated[float, within(0, 1, "1 discounts nothing")] = 1.0
    lam: Annotated[float, within(0, 1, "1 discounts nothing")] = 0.95
    # Weight of log pi_old - log pi_ref, subtracted from a token's reward.
    kl_coef: Annotated[float, at_least(0), in_float32] = 0.0


@dataclass(frozen=True)
class LossInfo:
    """What a loss declares about itself (``loss_info``); the defaults if it declares nothing."""

    mean_over: Over = "sequences"  # what it is a mean over (``reduce.mean_over``)
    per_sequence: frozenset[str] = frozenset()  # its metrics that are means over sequences
    advantages: Baseline = "group"  # the baseline that its paper subtracts from the reward
    scale_rewards: ScaleRewards = "group"  # the standard deviation that its paper divides by
    options: PolicyOptions | None = None  # its settings, if it is a policy loss of ``fxrl.losses``
    # Its data: completions of ``"prompts"``; given ``"sequences"``; ``"pairs"``, B chosen rows and
    # then their B rejected ones; or ``"labelled"`` sequences.
    reads: Reads = "prompts"
    reference: bool | None = None  # whether it reads ``ref_logps``; ``None``: not declared
    # Whether it reads ``kl``, KL(policy || reference) estimated from mismatched completions.
    mismatched_kl: bool = False
    scalar_head: bool = False  # the model outputs one number per sequence, not logits
    critic: Critic | None = None  # replaces ``advantages`` and ``scale_rewards`` with a value head


def tells(info: LossInfo) -> Callable[[LossFn], LossFn]:
    """Notes on a loss what ``loss_info`` reads from it."""

    def mark(loss_fn: LossFn) -> LossFn:
        loss_fn.loss_info = info  # type: ignore[attr-defined]
        return loss_fn

    return mark


def loss_info(loss_fn: Callable[..., Any]) -> LossInfo:
    """What ``tells`` has noted on a loss, whoever called its factory."""
    found = getattr(getattr(loss_fn, "func", loss_fn), "loss_info", None)  # func: of a partial
    return found if isinstance(found, LossInfo) else LossInfo()


def accepted(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names that a call may give as keywords, ``PolicyKeywords`` by theirs; None if any."""
    names: list[str] = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            if one.annotation != "Unpack[PolicyKeywords]":
                return None
            names += [field.name for field in fields(PolicyOptions)]
        elif one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            names.append(one.name)
    return tuple(names)


def check_keywords(name: str, function: Callable[..., Any], given: Iterable[str]) -> None:
    """Raise for keywords that ``function`` does not take, with the nearest that it does."""
    known = accepted(function)
    unknown = [key for key in given if known is not None and key not in known]
    if unknown:
        told = "; ".join(f"{key!r}{did_you_mean(key, known or ())}" for key in unknown)
        raise LossConfigError(f"{name} has no keyword {told}")


_P = ParamSpec("_P")


def loss_factory(factory: Callable[_P, LossFn]) -> Callable[_P, LossFn]:
    """The factory, which tells an unknown keyword as it tells a wrong value."""

    @functools.wraps(factory)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> LossFn:
        check_keywords(factory.__name__, factory, kwargs)
        return factory(*args, **kwargs)

    return checked
