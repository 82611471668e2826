"""The rewards of a step's completions.

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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxrl.distributed import Ranks
from fxrl.engines import Completion
from fxrl.rl.data.questions import Prompt
from fxrl.rl.data.rewards import Background, Reward, call_all, combine
from fxrl.rl.types import Drawn, Row, Told, TrainerState

Values = list[float | None]


class _Group(NamedTuple):
    """The completions of a prompt."""

    completions: Sequence[Completion]
    told: Sequence[Told]
    texts: Sequence[str] = ()
    values: Mapping[str, Values] = {}  # by reward, of those with ``per_group``


@dataclass
class Judge:
    """Judges the completions of one generation call."""

    rows: Sequence[Row]
    prompts: Sequence[Prompt]
    rewards: Sequence[Reward]
    tokenizer: Any
    state: TrainerState
    columns: Sequence[str] = ()  # of the data; None in a row that lacks one, whichever are drawn
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._groups: dict[int, _Group] = {}
        self._environments: dict[int, Sequence[Any]] = {}
        self._abandoned = False
        self._worker = Background(self._work, "rewards")

    def finished(
        self,
        prompt: int,
        group: Sequence[Completion],
        told: Sequence[Told] | None = None,
        environments: Sequence[Any] = (),
    ) -> None:
        """Take all completions of prompt number ``prompt`` and return at once; a prompt that a
        second try has drawn again counts once. ``environments`` that they were played in stay on
        this rank. Raises ``RewardError`` if a function has failed by now, so that drawing more is
        in vain."""
        self._worker.check()
        if prompt in self._groups:
            return
        self._groups[prompt] = _Group(group, told or [Told(self.prompts[prompt])] * len(group))
        if any(one is not None for one in environments):
            self._environments[prompt] = environments
        self._queue.put(prompt)

    def abandon(self) -> None:
        """Ends the thread after the call that it is at; for a generation call that failed."""
        self._abandoned = True
        self._queue.put(None)

    def verdict(self, groups: Sequence[Sequence[Completion]]) -> list[Drawn]:
        """Wait for the remaining values, and return the step's completions with what every function
        says of them. ``groups`` are empty for prompts that another rank has drawn. Raises
        ``RewardError`` if a function failed, ``RankError`` if another rank did."""
        for prompt, group in enumerate(groups):
            if group:
                self.finished(prompt, group)
        self._queue.put(None)
        self._worker.result()
        of_ranks = dict(self.ranks.every(self._groups.items()))
        every = {prompt: of_ranks[prompt] for prompt in range(len(groups))}
        completions, told, texts = _joined(every)
        values = {
            reward.name: [value for group in every.values() for value in group.values[reward.name]]
            for reward in self.rewards
            if reward.per_group
        }
        if late := [reward for reward in self.rewards if not reward.per_group]:
            found: dict[str, Values] = {}
            if self.ranks.primary:
                found = call_all(late, len(texts), self._arguments(every))
            values |= self.ranks.broadcast(found)
        names = [reward.name for reward in self.rewards]
        columns = [values[name] for name in names]
        by_name = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        totals = combine(columns, [reward.weight for reward in self.rewards])
        return [
            Drawn(*each) for each in zip(completions, texts, by_name, totals, told, strict=True)
        ]

    def _work(self) -> None:
        early = [reward for reward in self.rewards if reward.per_group]
        while (prompt := self._queue.get()) is not None and not self._abandoned:
            group = self._groups[prompt]
            ids = [list(completion.token_ids) for completion in group.completions]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            group = group._replace(texts=texts)
            values = call_all(early, len(texts), self._arguments({prompt: group}))
            self._groups[prompt] = group._replace(values=values)

    def _arguments(self, groups: Mapping[int, _Group]) -> Mapping[str, Any]:
        """TRL's arguments for the completions of these prompts, by their numbers."""
        completions, told, texts = _joined(groups)
        each_row = [self.rows[i] for i, group in groups.items() for _ in group.completions]
        columns = {str(name): [row.get(name) for row in each_row] for name in self.columns}
        further = dict.fromkeys(name for one in told for name in one.columns)
        columns |= {name: [one.columns.get(name) for one in told] for name in further}
        if all(prompt in self._environments for prompt in groups):  # not those of other ranks
            columns["environments"] = [one for i in groups for one in self._environments[i]]
        return columns | {
            "prompts": [one.prompt for one in told],
            "completions": [_said(text, one) for text, one in zip(texts, told, strict=True)],
            "completion_ids": [list(c.token_ids) for c in completions],
            "rows": each_row,
            "trainer_state": self.state,
        }


def _joined(groups: Mapping[int, _Group]) -> tuple[list[Completion], list[Told], list[str]]:
    """Completions, what they say besides, and their texts, one group behind the other."""
    every = groups.values()
    return (
        [completion for group in every for completion in group.completions],
        [one for group in every for one in group.told],
        [text for group in every for text in group.texts],
    )


def _said(text: str, told: Told) -> Any:
    """A completion as rewards get it."""
    if told.messages is not None:
        return list(told.messages)
    return text if isinstance(told.prompt, str) else [{"role": "assistant", "content": text}]
