"""Rollouts of several turns: what the policy says, what it is answered, and what is trained on.

All unfinished rollouts take their next turn in one call of the engine; then their tools are called,
and so on. A rollout ends where a turn calls no tool, where ``max_tool_calling_iterations`` or
``max_tokens`` (of all its turns and answers together) leave no room for another, or where a turn is
cut off. An answer that leaves no room for a further token is left out again.

NOTE [Random numbers of a turn]
Each turn has a seed of its own, mixed from that of the step and the turn's number, and in it each
rollout has its place. So a rollout draws the same whatever becomes of the others, on any number of
ranks, and in a resumed run, while the engine's own generator stands still.

NOTE [What is checked]
Every run of drawn tokens in what is trained on must be what the engine drew, with the very
log-probabilities, after exactly the tokens that stand before it. By construction
(``fxrl/rl/rollout/chat.py``, NOTE [Tokens in are tokens out]) that holds for tools and
environments. A rollout function that decodes, edits or re-templates what it has got breaks it, and
would train on tokens that the policy never chose: that is an error, not a warning.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxrl.engines import Completion, SamplingParams
from fxrl.rl.data.questions import Message, PromptBuilder
from fxrl.rl.errors import ToolError
from fxrl.rl.rollout.chat import Chat
from fxrl.rl.rollout.tools import Episode, Tools
from fxrl.rl.types import Row, Told, TrainerState

Generate = Callable[[Sequence[Sequence[int]], SamplingParams, Sequence[int], Sequence[int]], Any]
"""``Engine.generate`` with its ``only`` and ``max_tokens``."""


Group = tuple[Sequence[Completion], Sequence[Told], Sequence[Any]]
"""All completions of a prompt, and their environments, ``None`` where there is none."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The work for one call of a player."""

    rows: Sequence[Row]
    mine: Sequence[int]  # numbers of those to play, ``params.n`` rollouts each
    # Of each turn; ``max_tokens`` of all turns together, ``seed`` of the call.
    params: SamplingParams
    state: TrainerState
    generate: Generate


@dataclass(slots=True)
class Transcript:
    """One rollout's tokens and messages, as far as it has come."""

    prompt: Sequence[int]
    most: int  # tokens of its completion
    tokens: list[int] = field(default_factory=list)  # of the completion, drawn ones and answers
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    draws: list[Completion] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    over: bool = False  # there is no further turn

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.most - len(self.tokens)

    def add(self, drawn: Completion, said: Message) -> None:
        """A turn of the policy's."""
        self.tokens += drawn.token_ids
        self.sampled += [True] * len(drawn.token_ids)
        self.logprobs += drawn.logprobs
        self.draws.append(drawn)
        self.messages.append(said)

    def answer(self, ids: Sequence[int], answers: Sequence[Message]) -> None:
        """Append the answer to the turn if there is room for it and a token more; else the
        transcript is over."""
        if len(ids) >= self.room:
            self.over = True
            return
        self.tokens += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += answers

    def completion(self) -> Completion:
        last, whole = self.draws[-1], self.draws[-1].finish_reason
        cut = bool(self.messages[-1].get("tool_calls"))  # a call that was not answered any more
        return Completion(
            prompt_token_ids=tuple(self.prompt),
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason="length" if cut else whole,
            policy_version=last.policy_version,
            sampled=None if all(self.sampled) else tuple(self.sampled),
        )


def check_sampled(whole: Completion, draws: Iterable[Completion], who: str) -> None:
    """Refuses tokens that are not among ``draws`` of the engine: NOTE [What is checked]."""
    by_prompt: dict[tuple[int, ...], list[Completion]] = defaultdict(list)
    for draw in draws:
        by_prompt[draw.prompt_token_ids].append(draw)
    ids = whole.prompt_token_ids + whole.token_ids
    sampled = whole.sampled or (True,) * len(whole.token_ids)
    at, first = 0, len(whole.prompt_token_ids)
    while at < len(sampled):
        if not sampled[at]:
            at += 1
            continue
        run = next((i for i in range(at, len(sampled)) if not sampled[i]), len(sampled))
        for draw in by_prompt[ids[: first + at]]:
            end = min(run, at + len(draw.token_ids))
            given = whole.token_ids[at:end], whole.logprobs[at:end]
            if given == (draw.token_ids[: end - at], draw.logprobs[: end - at]):
                at = end
                break
        else:
            raise ToolError(
                f"{who}: tokens {at} to {run} of a completion are not what the engine drew after "
                "the tokens before them, so training on them would be wrong. Put tokens behind "
                "each other as they were drawn, with their log-probs; do not encode text that was "
                "decoded; and mark what the policy did not draw by 0 in env_mask"
            )


def turn_seed(base: str | int | None, turn: int) -> int:
    """NOTE [Random numbers of a turn]."""
    return random.Random(f"{base}/{turn}").getrandbits(63)


def drawn_turn(asked: Assignment, playing: Mapping[int, Transcript], turn: int) -> list[Completion]:
    """The next turn of each, by its place in the step, drawn in one call of the engine."""
    params = replace(asked.params, n=1, seed=turn_seed(asked.params.seed, turn))
    total = len(asked.rows) * asked.params.n
    first = next(iter(playing.values()))
    prompts: list[Sequence[int]] = [first.prompt] * total  # those not in ``only`` do not run
    most = [params.max_tokens] * total
    for place, one in playing.items():
        prompts[place], most[place] = [*one.prompt, *one.tokens], one.room
    found = asked.generate(prompts, params, list(playing), most)
    return [found[place][0] for place in playing]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Rollouts with tools and environments."""

    tools: Tools
    chat: Chat
    builder: PromptBuilder
    most_calls: int | None  # turns of a rollout that may call tools

    def play(self, asked: Assignment) -> Iterator[tuple[int, Group]]:
        """Row numbers and their completions, each as soon as its last rollout is over; the row's
        environments remain usable until the next call.

        Raises ``ToolError`` if a tool, an environment or a function failed, ``EngineError`` if
        generation did.
        """
        num = asked.params.n
        given = [asked.rows[row] for row in asked.mine for _ in range(num)]
        places = [row * num + i for row in asked.mine for i in range(num)]
        groups = {row: range(at * num, at * num + num) for at, row in enumerate(asked.mine)}
        episodes = self.tools.begin(given, [self.builder.prompt(row) for row in given])
        try:
            prompts = [self.builder.encode(one.prompt, one.schemas) for one in episodes]
            transcripts = [Transcript(prompt, asked.params.max_tokens) for prompt in prompts]
            for turn in itertools.count():
                live = [i for i, one in enumerate(transcripts) if not one.over]
                if not live:
                    return
                playing = {places[i]: transcripts[i] for i in live}
                drawn = drawn_turn(asked, playing, turn)
                self._respond([(episodes[i], transcripts[i]) for i in live], drawn, turn)
                over = [r for r, group in groups.items() if all(transcripts[i].over for i in group)]
                for row in over:
                    group = groups.pop(row)
                    yield row, self._told([(episodes[i], transcripts[i]) for i in group])
        finally:
            self.tools.end(episodes)

    def _respond(
        self,
        live: Sequence[tuple[Episode, Transcript]],
        drawn: Sequence[Completion],
        turn: int,
    ) -> None:
        """Adds the turns, calls the tools that they name, and adds what these say."""
        going_on = []
        for (episode, transcript), one in zip(live, drawn, strict=True):
            ended = one.finish_reason == "stop"
            said = self.chat.parse(
                one.token_ids, one.prompt_token_ids, episode.schemas, ended=ended
            )
            transcript.add(one, said)
            calls = said.get("tool_calls", ())
            may_call = self.most_calls is None or turn < self.most_calls
            transcript.over = not (calls and ended and may_call and transcript.room > 1)
            if not transcript.over:
                going_on.append((episode, transcript, one.token_ids[-1], said))
        answers = self.tools.answers([(e, said["tool_calls"]) for e, _, _, said in going_on])
        for (episode, transcript, stop, said), messages in zip(going_on, answers, strict=True):
            ids = self.chat.answered(said, messages, stop, episode.schemas)
            transcript.answer(ids, messages)

    def _told(self, group: Sequence[tuple[Episode, Transcript]]) -> Group:
        completions = []
        for _, transcript in group:
            completions.append(transcript.completion())
            check_sampled(completions[-1], transcript.draws, "a rollout with tools")
        told = [
            Told(
                episode.prompt,
                transcript.messages,
                num_calls=episode.num_calls,
                num_failed=episode.num_failed,
            )
            for episode, transcript in group
        ]
        return completions, told, [episode.environment for episode, _ in group]
