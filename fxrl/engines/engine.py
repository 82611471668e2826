"""What a rollout engine is: tokens in, sampled tokens and their log-probabilities out.

An engine never sees text. Prompts are token ids without padding; what comes back is one
``Completion`` per sample, grouped by prompt.

NOTE [Which log-probability]
``Completion.logprobs`` holds log softmax(logits / temperature) at the sampled token, before
top-k, top-p and min-p cut the distribution. That is the number the trainer recomputes from the
model's logits, so with equal weights the importance ratio of the first update is exactly 1, and a
cut token never gets -inf. Where a filter is on, the token was drawn from the renormalised filtered
distribution, whose log-probability is higher by the constant -log(kept mass). Greedy decoding
(temperature 0) has no sampling temperature: it reports log softmax(logits).

vLLM reports one number per token, after everything that changes the distribution. Where nothing
but the temperature does, both definitions agree; where something else does (a filter,
``min_tokens``, a penalty), ``VllmEngine`` reports the log-probability under the distribution that
the token was drawn from. That is the right denominator of an importance weight, but not what the
trainer recomputes: the first ratio of a token is then the kept mass and not 1, and that of a
completion the product over its tokens, which goes to 0 with its length.

NOTE [Stop tokens stay]
The token that ends a completion (EOS or one of ``stop_token_ids``) is the last entry of
``token_ids`` and has a log-probability: the policy chose it, so it must get gradient.

NOTE [Why an engine makes the model too]
The embedded engine samples with the trainer's own model, so the model comes first. vLLM owns the
weights: it loads them, the trainer's model is made over its storages, the adapter goes on top, and
then the engine is told whose policy it serves. Which order is right only the engine knows; that an
optimizer may be made only afterwards, since it refers to the parameters, holds for all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from fxrl.errors import ConfigError, FxrlError
from fxrl.options import Options, above, at_least, within

log = logging.getLogger(__name__)


class SamplingParamsError(ConfigError):
    """A sampling parameter is out of range."""


class EngineError(FxrlError):
    """An engine was asked for something it cannot do in its present state."""


class PromptError(EngineError, ValueError):
    """A prompt is empty, or does not fit into the engine's budget or the model's context."""


class GenerateTimeoutError(EngineError, TimeoutError):
    """A call of ``generate`` took longer than allowed and was ended; the engine is as before."""


@dataclass(frozen=True, slots=True)
class SamplingParams(Options):
    """How to draw completions. Names and meanings follow vLLM and Hugging Face.

    Filters apply in the order temperature, top-k, top-p, min-p, each to what the one before kept.

    Attributes:
        n: completions per prompt; they share one prefill.
        temperature: logits are divided by it; 0 is greedy (filters and seed then do nothing).
        top_p: keep the smallest set of most likely tokens with mass >= top_p; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: keep tokens with p >= min_p * max p; 0 keeps all.
        max_tokens: longest completion, in tokens, the stop token included.
        seed: ``None`` draws from the engine's own generator, which moves on (see
            ``Engine.state_dict``); a number makes this call reproducible by itself and leaves the
            engine's generator where it is.
        stop_token_ids: end a completion besides the engine's EOS ids.
        ignore_eos: the engine's EOS ids do not end a completion (``stop_token_ids`` still do).
        min_tokens: ids that end a completion cannot be drawn before this many tokens.
        extra: further sampling parameters of vLLM by vLLM's names (``repetition_penalty``,
            ``logit_bias``, ``structured_outputs``, ...); other engines refuse them.

    Raises:
        SamplingParamsError: a value is out of range; the message says which, why and the cure.
    """

    unfit: ClassVar[type[ConfigError]] = SamplingParamsError

    n: Annotated[int, at_least(1, "ask for one or more completions")] = 1
    temperature: Annotated[float, at_least(0, "use 0 for greedy, 1 for the model")] = 1.0
    top_p: Annotated[float, above(0), within(0, 1, "use 1 to keep every token")] = 1.0
    top_k: Annotated[int, at_least(0, "use 0 to keep every token")] = 0
    min_p: Annotated[float, within(0, 1, "use 0 to keep every token")] = 0.0
    max_tokens: Annotated[int, at_least(1, "a completion has at least one token")] = 256
    seed: Annotated[int, at_least(0, "use None for the engine's own generator")] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, at_least(0, "use 0 for no minimum")] = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def problems(self) -> Iterator[str]:
        if wrong := [token for token in self.stop_token_ids if token < 0]:
            yield f"stop_token_ids has {wrong[0]}; token ids start at 0"
        if self.min_tokens > self.max_tokens:
            yield (
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; "
                "raise max_tokens or lower min_tokens"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion; plain Python numbers, so it can outlive every tensor.

    Attributes:
        prompt_token_ids: the prompt as given, without padding.
        token_ids: the sampled tokens, the stop token included (NOTE [Stop tokens stay]).
        logprobs: natural log-probability of each of ``token_ids``, same length
            (NOTE [Which log-probability]).
        finish_reason: ``"stop"`` (a stop token was drawn) or ``"length"`` (``max_tokens`` reached).
        policy_version: the version of the weights that drew it, see ``Engine.policy_version``.
        sampled: of a completion of several turns, which of ``token_ids`` the policy drew; the
            others are context that came in between, such as a tool's output, and their
            ``logprobs`` are 0. ``None``: all.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    sampled: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "one log-probability per token"
        assert self.sampled is None or len(self.sampled) == len(self.token_ids), "one per token"

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew, which are those that are trained on."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)


OnFinished = Callable[[int, "list[Completion]"], None]
"""Told of each prompt's completions while others are still being drawn; see ``Engine.generate``."""


@runtime_checkable
class Engine(Protocol):
    """The rollout side of RL fine-tuning.

    The order of one training iteration::

        completions = engine.generate(prompts, params)
        with engine.standby():                    # the KV cache's memory belongs to the trainer
            ... loss, backward, optimizer step ...
        engine.update_weights(policy_version=engine.policy_version + 1)   # or update_lora
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that ``generate`` samples from; starts at 0."""

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds inside the last ``generate`` and the last ``standby``, by part (``"generate"``,
        ``"fold"``, ``"restore"``, ``"sync"``; ``"release"``, ``"wake"``); empty where an engine
        measures none."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        only: Collection[int] | None = None,
        on_finished: OnFinished | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Draws ``params.n`` completions for every prompt.

        Args:
            prompts: token ids without padding.
            params: how to draw.
            only: numbers of the prompts to draw for, all by default. What is drawn for each, and
                what the next call draws, is the same whichever they are: engines of several
                processes with one seed share a call's prompts among them.
            on_finished: called as ``on_finished(prompt_index, completions)`` as soon as all
                ``params.n`` completions of a prompt are there, in the order of the samples; once
                for each prompt, in any order of prompts, from the thread that called ``generate``
                and before that returns. It must be quick: the engine waits for it. The same
                completions are in the result. What it raises ends the call.
            max_tokens: most tokens of each prompt's completions, from 1 to ``params.max_tokens``;
                what is drawn up to there does not depend on it.

        Returns:
            One list per prompt, in the order given, each with ``params.n`` completions, or empty
            where ``only`` leaves the prompt out.

        Raises:
            PromptError: a prompt is empty or too long.
            EngineError: the engine is in standby or closed, or the logits are not finite.
            GenerateTimeoutError: the engine has a time limit and it is over.
        """

    def most_at_once(self, tokens: int) -> int:
        """The most sequences of so many tokens, prompts included, that are drawn at once."""

    def standby(self) -> AbstractContextManager[None]:
        """Gives the memory that only generation needs to the trainer, until the block ends."""

    def wake(self) -> None:
        """Leaves standby before its block ends; does nothing when awake."""

    def update_weights(self, *, policy_version: int) -> None:
        """Let ``generate`` use the trainer's present weights, as ``policy_version`` (never lower
        than before), and drop stale caches."""

    def update_lora(self, *, policy_version: int) -> None:
        """The same if only the model's LoRA factors have changed."""

    def state_dict(self) -> dict[str, Any]:
        """The sampler's random state and the policy version, for an exact resume (no weights)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``: the same calls then draw the same completions."""

    def close(self) -> None:
        """Frees everything; a closed engine cannot generate. May be called twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a run needs from its engine, and how to obtain the model."""

    load: Callable[[], tuple[nn.Module, Any]]  # the model on ``device``, and its tokenizer
    folder: Callable[[], tuple[Path, Any]]  # the same model as a checkpoint, and its tokenizer
    trainable: Callable[[nn.Module], nn.Module]  # adds the adapter and sets train mode
    longest_prompt: int  # tokens of the longest prompt of the run
    max_tokens: int  # of the longest completion
    num_sequences: int  # completions of a step that this process draws
    device: torch.device  # of the trainer's model
    dtype: torch.dtype  # of its weights
    autocast: torch.dtype | None  # its compute dtype, if another one
    seed: int  # of the engine's own draws
    tell: Callable[[str], None]  # shows the user a line
    # ``with stage(words) as say``: shows what is being done; ``say`` replaces the words.
    stage: Callable[[str], AbstractContextManager[Callable[[str], None]]]
    options: Any = None  # the engine's own, such as ``VllmOptions``
    lora_rank: int | None = None  # of the adapter that ``trainable`` adds, if any
    prompts_grow: bool = False  # environments extend prompts, up to ``longest_prompt`` tokens


class Built(NamedTuple):
    """What an engine's ``build`` returns."""

    model: nn.Module  # with its adapter, in train mode
    tokenizer: Any
    engine: Engine


class Drawing:
    """Tells the log, at INFO and at most once a second, how far a call of ``generate`` has come."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._start = self._told = clock()
        self._tokens = self._ended = 0

    def add(self, tokens: int, ended: int) -> None:
        """``tokens`` more were drawn, and ``ended`` more completions have their last one."""
        self._tokens += tokens
        self._ended += ended
        if (now := self._clock()) - self._told >= 1.0:
            self._told, speed = now, self._tokens / (now - self._start)
            words = "generating: %d of %d completions, %.0f tokens/s"
            log.info(words, self._ended, self._total, speed)


class Groups:
    """Completions as they end, in whatever order, by prompt."""

    def __init__(self, prompts: int, n: int, on_finished: OnFinished | None) -> None:
        self._found: list[dict[int, Completion]] = [{} for _ in range(prompts)]
        self._n, self._on_finished = n, on_finished

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """One that has ended; if it is its prompt's last, that is told."""
        self._found[prompt][sample] = completion
        if len(self._found[prompt]) == self._n and self._on_finished is not None:
            self._on_finished(prompt, self.all()[prompt])

    def all(self) -> list[list[Completion]]:
        """The completions of every prompt so far, in the order of the samples."""
        return [[found[sample] for sample in sorted(found)] for found in self._found]


def check_prompts(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    vocab_size: int,
    limit: int,
    of: str,
    max_tokens: Sequence[int] | None = None,
) -> list[int]:
    """The most tokens of each prompt's completions. Raises ``PromptError`` if an engine could not
    take a prompt: a prompt and its completion have at most ``limit`` tokens, and ``of`` says in the
    message what sets that limit."""
    most = [params.max_tokens] * len(prompts) if max_tokens is None else list(max_tokens)
    if len(most) != len(prompts) or not all(1 <= each <= params.max_tokens for each in most):
        raise PromptError(
            f"max_tokens={most[:8]} for {len(prompts)} prompts: give each a number from 1 to "
            f"params.max_tokens={params.max_tokens}"
        )
    for index, (prompt, room) in enumerate(zip(prompts, most, strict=True)):
        if not prompt:
            raise PromptError(f"prompt {index} is empty; give at least one token, such as BOS")
        if not (min(prompt) >= 0 and max(prompt) < vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise PromptError(
                f"prompt {index} holds token id {wrong}, outside the model's {vocab_size} "
                "embeddings; is this the model's own tokenizer?"
            )
        if len(prompt) + room > limit:
            raise PromptError(
                f"prompt {index} has {len(prompt)} tokens and max_tokens={room}: more "
                f"than {of}; shorten the prompt or lower max_tokens"
            )
    return most


_CURES = {
    "standby": "leave its block or call wake()",
    "closed": "make a new one",
    "failed": "vLLM failed earlier; close() it and make a new one",
}


def check_awake(state: str, what: str) -> None:
    """Refuses what only an engine that is awake can do."""
    if state != "awake":
        raise EngineError(f"{what}: the engine is {state}; {_CURES[state]}")


def eos_ids(tokenizer: Any, generation: Any) -> frozenset[int]:
    """Ids that end a completion: the tokenizer's, and those of a generation configuration."""
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def newer(policy_version: int, present: int) -> int:
    """``policy_version``, if it is none that the engine has left behind."""
    if policy_version < present:
        raise EngineError(
            f"policy_version={policy_version} is older than the engine's {present}; versions only "
            "grow (load_state_dict goes back)"
        )
    return policy_version


def check_state(state: Mapping[str, Any], needed: set[str]) -> None:
    """Refuses what is not the engine's own ``state_dict``."""
    if missing := needed - state.keys():
        raise EngineError(
            f"engine state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
        )
