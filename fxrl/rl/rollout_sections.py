"""The tables of a training configuration that say how completions are drawn and judged.

As ``fxrl.rl.sections``: defaults live here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fxrl.rl.checks import above, at_least, none_of, regular_expression, when, within
from fxrl.rl.rewards import reward_problems


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """``[reward]``.

    Attributes:
        functions: built-in names (``exact``, ``reasoning_gym``, ``length``, ``regex``) or
            ``module:function`` with TRL's signature.
        weights: one per function; all 1 by default.
        params: keywords by function name, ``[reward.params.length] target = 8``.
        extract: regular expression; built-ins judge its last match in the completion (the whole
            text where nothing matches).
        timeout_s: seconds that one call of one function may take; ``none`` waits for ever.
        retries: further calls of a function that raised or took too long.
        on_error: then ``stop`` the run (its state is saved), or ``skip``: these completions get no
            value from this function, as if it had returned ``None``.
        per_group: call your own functions for each prompt's completions as soon as these are
            there, while the engine draws others; by default once a step, with all of them.
    """

    functions: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    extract: str | None = None
    timeout_s: float | None = None
    retries: int = 0
    on_error: Literal["stop", "skip"] = "stop"
    per_group: bool = False

    def __post_init__(self) -> None:
        num, weights = len(self.functions), self.weights
        none_of(
            when(not num, "functions is empty; name at least one reward"),
            when(
                weights is not None and len(weights) != num,
                f"weights has {len(weights or ())} entries for {num} functions",
            ),
            regular_expression("extract", self.extract),
            above("timeout_s", self.timeout_s, 0.0),
            at_least("retries", self.retries, 0),
            reward_problems(self.functions, self.params),
        )


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """``[sampling]``: how completions are drawn; ``num_generations`` per prompt.

    ``ignore_eos``, ``min_tokens`` and ``stop_token_ids`` are those of ``SamplingParams``.
    ``extra`` are further sampling parameters of vLLM by its own names, for ``engine = "vllm"``:
    ``extra = { repetition_penalty = 1.1 }``. What they do to the distribution the trainer does not
    repeat; the importance-sampling correction of the losses accounts for it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    num_generations: int = 8
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        none_of(
            at_least("min_tokens", self.min_tokens, 0),
            when(
                self.min_tokens > self.max_tokens,
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}",
            ),
            above("temperature", self.temperature, 0.0),
            within("top_p", self.top_p, 0.0, 1.0),
            above("top_p", self.top_p, 0.0),
            within("min_p", self.min_p, 0.0, 1.0),
            at_least("top_k", self.top_k, 0),
            at_least("max_tokens", self.max_tokens, 1),
            at_least("num_generations", self.num_generations, 2),
        )


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """``[eval]``: held-out questions, never trained on; 0 is off.

    Attributes:
        size: questions held out (distinct prompts).
        every: steps between evaluations besides before the first and after the last step; 0: none.
        greedy: temperature 0; else one sample each at ``[sampling]``.
        reward: the function whose value >= 0.99 counts as right; the first one by default.
        batch: prompts per generation call.
    """

    size: int = 0
    every: int = 0
    greedy: bool = True
    reward: str | None = None
    batch: int = 64

    def __post_init__(self) -> None:
        none_of(
            at_least("size", self.size, 0),
            at_least("every", self.every, 0),
            at_least("batch", self.batch, 1),
        )
