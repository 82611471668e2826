"""A rollout function of the user's, with TRL's signature: ``rollout_func(prompts, trainer)``.

It plays the rollouts itself, in whatever way, and returns their tokens. It is called once a step
(once more for each refill, and for each batch of an evaluation), on every rank with that rank's
prompts, each as often as there are completions of it, one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fxrl.distributed import Ranks
from fxrl.engines import Completion, Engine
from fxrl.errors import FxrlError, shown
from fxrl.losses.own_code import load_function
from fxrl.rl.data.questions import PromptBuilder
from fxrl.rl.errors import ToolError, defined_at, name_of, raised
from fxrl.rl.rollout.turns import Assignment, Group, check_sampled, turn_seed
from fxrl.rl.types import Told

NEEDED = ("prompt_ids", "completion_ids", "logprobs")
"""What the function must return; ``env_mask`` and further columns for the rewards it may."""


class RolloutTrainer:
    """What a rollout function gets as ``trainer``, under ``GRPOTrainer``'s names.

    Attributes:
        processing_class: the tokenizer.
        state: of the run.
        args: ``max_completion_length``, ``num_generations`` (completions of each prompt in this
            call), ``temperature``, ``top_p``, ``top_k``, ``min_p``.
        draws: what ``generate`` has drawn.
    """

    def __init__(self, tokenizer: Any, asked: Assignment, rank: int) -> None:
        self.processing_class, self.state, params = tokenizer, asked.state, asked.params
        self.args = SimpleNamespace(
            max_completion_length=params.max_tokens,
            num_generations=params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
        )
        self.draws: list[Completion] = []
        self._params, self._generate, self._calls = params, asked.generate, 0
        self._seed = f"{params.seed}/{rank}"

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], max_tokens: int | None = None
    ) -> list[Completion]:
        """One completion of each prompt, given as token ids without padding, drawn in one call of
        the engine; ``max_tokens`` each, by default ``sampling.max_tokens``. Raises ``PromptError``
        if a prompt is empty or too long."""
        seed = turn_seed(self._seed, self._calls)
        self._calls += 1
        params = replace(self._params, n=1, seed=seed)
        most = [params.max_tokens if max_tokens is None else max_tokens] * len(prompt_ids)
        found = self._generate(prompt_ids, params, range(len(prompt_ids)), most)
        drawn: list[Completion] = [group[0] for group in found]
        self.draws += drawn
        return drawn

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.{name}: this is no GRPOTrainer; it has processing_class, state, args "
            "(max_completion_length, num_generations, temperature, ...) and "
            "generate(prompt_ids, max_tokens=None)"
        )


class RolloutFunction:
    """Rollouts that a function of the user's plays, ``rollout.rollout_func``."""

    def __init__(
        self,
        given: str | Callable[..., Any],
        builder: PromptBuilder,
        engine: Engine,
        ranks: Ranks | None = None,
    ) -> None:
        self.function, self.builder, self.engine = load_function(given), builder, engine
        self.ranks = ranks or Ranks()
        self._stop_ids = getattr(engine, "eos_token_ids", None) or {builder.tokenizer.eos_token_id}

    def play(self, asked: Assignment) -> Iterator[tuple[int, Group]]:
        """As ``Conversation.play``; all groups are over at once."""
        n, prompts = asked.params.n, [self.builder.prompt(asked.rows[row]) for row in asked.mine]
        repeated = [prompt for prompt in prompts for _ in range(n)]
        if not repeated:
            return
        trainer = RolloutTrainer(self.builder.tokenizer, asked, self.ranks.rank)
        output = self._called(repeated, trainer)
        try:
            completions, columns = self._read(output, len(repeated))
        except (ValueError, TypeError) as error:
            raise ToolError(f"{self._named()} returned {error}") from error
        for one in completions if trainer.draws else ():
            check_sampled(one, trainer.draws, self._named())
        told = [
            Told(prompt, None, {name: values[i] for name, values in columns.items()})
            for i, prompt in enumerate(repeated)
        ]
        for number, row in enumerate(asked.mine):
            span = slice(number * n, number * n + n)
            yield row, (completions[span], told[span], [None] * n)

    def _called(self, prompts: list[Any], trainer: RolloutTrainer) -> Any:
        try:
            return self.function(prompts, trainer)
        except (FxrlError, KeyboardInterrupt):
            raise
        # User code may raise anything; the run must be saved and the function named.
        except BaseException as error:
            raise ToolError(
                f"{self._named()} {raised(error)}; mend it, and go on with --resume"
            ) from error

    def _named(self) -> str:
        return f"rollout.rollout_func {name_of(self.function)!r}{defined_at(self.function)}"

    def _read(self, output: Any, num: int) -> tuple[list[Completion], dict[str, Sequence[Any]]]:
        if not isinstance(output, Mapping) or (lacking := [k for k in NEEDED if k not in output]):
            what = f"no {', '.join(lacking)}" if isinstance(output, Mapping) else shown(output)
            raise ValueError(f"{what}; it must return a dict with {', '.join(NEEDED)}")
        for name, values in output.items():
            if not isinstance(values, list | tuple) or len(values) != num:
                found = len(values) if isinstance(values, list | tuple) else shown(values)
                raise ValueError(
                    f"{found} {name} for {num} prompts; return a list with one entry per prompt "
                    "given (each stands there as often as it has completions)"
                )
        masks = output.get("env_mask", [None] * num)
        every = zip(*(output[name] for name in NEEDED), masks, strict=True)
        completions = [self._completion(i, *one) for i, one in enumerate(every)]
        rest = {k: v for k, v in output.items() if k not in (*NEEDED, "env_mask")}
        return completions, rest

    def _completion(
        self, number: int, prompt: Any, tokens: Any, logprobs: Any, mask: Any
    ) -> Completion:
        where = f"for prompt {number}"
        prompt = _ints(prompt, f"prompt_ids {where}")
        tokens = _ints(tokens, f"completion_ids {where}")
        sampled = (True,) * len(tokens) if mask is None else tuple(bool(each) for each in mask)
        # vLLM's are lists, of the likeliest tokens; the first is the one that was drawn.
        flat = [each[0] if isinstance(each, list | tuple) else each for each in logprobs]
        if not len(tokens) == len(sampled) == len(flat):
            raise ValueError(
                f"{len(tokens)} completion_ids, {len(flat)} logprobs and {len(sampled)} entries of "
                f"env_mask {where}; give one each per token"
            )
        if not any(sampled):
            raise ValueError(f"env_mask {where} without a 1: no token that the policy has drawn")
        size = len(self.builder.tokenizer)
        known = prompt + tuple(t for t, s in zip(tokens, sampled, strict=True) if not s)
        if wrong := [token for token in known if not 0 <= token < size]:
            raise ValueError(f"token id {wrong[0]} {where}; the tokenizer has {size}")
        return Completion(
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=tuple(float(p) if s else 0.0 for p, s in zip(flat, sampled, strict=True)),
            finish_reason="stop" if tokens[-1] in self._stop_ids else "length",
            policy_version=self.engine.policy_version,
            sampled=None if all(sampled) else sampled,
        )


def _ints(given: Any, what: str) -> tuple[int, ...]:
    values = tuple(given.tolist() if hasattr(given, "tolist") else given)
    if not values or not all(isinstance(each, int) for each in values):
        raise ValueError(f"{shown(given)} as {what}; give token ids, at least one")
    return values
