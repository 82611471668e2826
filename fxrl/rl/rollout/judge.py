"""Texts and rewards of completions, worked out while the engine still draws others.

NOTE [What overlaps]
As soon as all completions of a prompt are there, a thread decodes them and calls the rewards that
judge each completion by itself (``Reward.per_group``). The others get the whole step at its end,
as TRL calls them, because they may compare completions of different prompts. Which thread calls a
function, and when, changes no value. Waiting (a sandbox, a server) is hidden behind generation;
Python's own work is not, it shares the interpreter with the engine.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxrl.engines import Completion
from fxrl.rl.data.limits import Background
from fxrl.rl.data.prompts import Prompt
from fxrl.rl.data.rewards import Reward, call_all
from fxrl.rl.types import Row

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions may read of the run, under TRL's names (``trainer_state``)."""

    global_step: int
    max_steps: int
    epoch: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Texts and each function's values, one entry per completion, prompt by prompt."""

    texts: list[str]
    by_function: dict[str, Values]


class Judge:
    """Judges the completions of one generation call.

    Args:
        rows: one per prompt.
        prompts: of the rows.
        rewards: the run's.
        tokenizer: decodes.
        state: the run's.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        rewards: Sequence[Reward],
        tokenizer: Any,
        state: TrainerState,
    ) -> None:
        self.rows, self.prompts, self.rewards = rows, prompts, rewards
        self.tokenizer, self.state = tokenizer, state
        self._queue: queue.SimpleQueue[tuple[int, Sequence[Completion]] | None]
        self._queue = queue.SimpleQueue()
        self._seen: set[int] = set()
        self._texts: dict[int, list[str]] = {}
        self._values: dict[int, dict[str, Values]] = {}
        self._worker = Background(self._work, "rewards")

    def finished(self, prompt: int, group: Sequence[Completion]) -> None:
        """Takes all completions of prompt number ``prompt``; returns at once."""
        self._seen.add(prompt)
        self._queue.put((prompt, group))

    def abandon(self) -> None:
        """Ends the thread after what it is at; for a generation call that failed."""
        self._queue.put(None)

    def verdict(self, groups: Sequence[Sequence[Completion]]) -> Verdict:
        """Waits for the rest.

        Raises:
            RewardError: a function failed.
        """
        for prompt, group in enumerate(groups):
            if prompt not in self._seen:
                self.finished(prompt, group)
        self._queue.put(None)
        self._worker.result()
        order = range(len(groups))
        texts = [text for prompt in order for text in self._texts[prompt]]
        early = {
            name: [value for prompt in order for value in self._values[prompt][name]]
            for name in (reward.name for reward in self.rewards if reward.per_group)
        }
        late = [reward for reward in self.rewards if not reward.per_group]
        counts = [len(group) for group in groups]
        if late:
            completions = [completion for group in groups for completion in group]
            early |= call_all(late, len(texts), self._arguments(order, counts, texts, completions))
        return Verdict(texts, {reward.name: early[reward.name] for reward in self.rewards})

    def _work(self) -> None:
        early = [reward for reward in self.rewards if reward.per_group]
        while (item := self._queue.get()) is not None:
            prompt, group = item
            ids = [list(completion.token_ids) for completion in group]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            self._texts[prompt] = texts
            arguments = self._arguments([prompt], [len(group)], texts, group)
            self._values[prompt] = call_all(early, len(group), arguments)

    def _arguments(
        self,
        prompts: Sequence[int],
        counts: Sequence[int],
        texts: Sequence[str],
        completions: Sequence[Completion],
    ) -> Mapping[str, Any]:
        """TRL's arguments for the completions of the given prompts."""
        each = [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
        each_row = [self.rows[prompt] for prompt in each]
        each_prompt = [self.prompts[prompt] for prompt in each]
        # A column that only some rows have is None in the others, whichever rows are judged.
        names = dict.fromkeys(name for row in self.rows for name in row if name != "prompt")
        columns = {str(name): [row.get(name) for row in each_row] for name in names}
        return columns | {
            "prompts": each_prompt,
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for text, prompt in zip(texts, each_prompt, strict=True)
            ],
            "completion_ids": [list(c.token_ids) for c in completions],
            "rows": each_row,
            "trainer_state": self.state,
        }
