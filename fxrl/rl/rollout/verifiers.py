"""Environments of the ``verifiers`` package, played with the run's engine.

One of these is a taskset, whose tasks are the run's questions and which judges them, and a harness:
a program that plays a task against a chat endpoint. verifiers runs it, its tools and its scoring,
and knows of fxrl but that endpoint's address (``fxrl/rl/rollout/endpoint.py``).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxrl.errors import shown
from fxrl.rl.config.tables import RolloutConfig
from fxrl.rl.data.questions import PromptBuilder
from fxrl.rl.data.verifiers import REWARD, Environment
from fxrl.rl.errors import ToolError
from fxrl.rl.rollout.chat import Chat
from fxrl.rl.rollout.endpoint import Endpoint, Talk
from fxrl.rl.rollout.turns import Assignment, Group, check_sampled, drawn_turn
from fxrl.rl.types import Told

log = logging.getLogger(__name__)

LEAVE_S = 20.0
"""Seconds that ended rollouts have to take down what they made; then they are not waited for."""


@dataclass(frozen=True, slots=True)
class VerifiersPlayer:
    """Plays an environment's tasks."""

    environment: Environment
    builder: PromptBuilder
    config: RolloutConfig

    def play(self, asked: Assignment) -> Iterator[tuple[int, Group]]:
        """As ``Conversation.play``."""
        num = asked.params.n
        places = [row * num + i for row in asked.mine for i in range(num)]
        keywords, template = self.builder.config.chat_template_kwargs, self.config.response_template
        make = functools.partial(Chat, self.builder.tokenizer, keywords, template)
        chat: Callable[[bool], Chat] = functools.cache(lambda calls: make(calls=calls))
        talks = [Talk(self.builder, chat, asked.params) for _ in places]
        groups = {row: range(at * num, at * num + num) for at, row in enumerate(asked.mine)}
        tasks = [self.environment.tasks[asked.rows[place // num]["task"]] for place in places]
        with Endpoint(len(places)) as endpoint, Episodes(self.environment, tasks, endpoint) as run:
            for turn in itertools.count():
                self._turn(asked, endpoint, dict(zip(places, talks, strict=True)), turn)
                run.check()
                over = [row for row, group in groups.items() if run.found.keys() >= {*group}]
                for row in over:
                    group = groups.pop(row)
                    yield row, self._told([(talks[i], run.found[i]) for i in group])
                if not groups:
                    return

    def _turn(
        self, asked: Assignment, endpoint: Endpoint, talks: Mapping[int, Talk], turn: int
    ) -> None:
        """Answers all that is asked, drawing what must be drawn in one call."""
        try:
            exchanges = endpoint.asked(self.config.timeout_s)
        except TimeoutError:
            raise ToolError(
                f"data.verifiers: no rollout has asked or ended for rollout.timeout_s="
                f"{self.config.timeout_s:g}; look for what hangs in the environment, or raise it"
            ) from None
        places, playing = list(talks), {}
        for one in exchanges:
            place = places[one.rollout]
            if (reply := talks[place].listen(one.body)) is not None:
                one.reply.set_result(reply)
            else:
                playing[place] = one
        if not playing:
            return
        transcripts = {place: talks[place].transcript for place in playing}
        drawn = drawn_turn(asked, transcripts, turn)  # type: ignore[arg-type]
        for (place, exchange), completion in zip(playing.items(), drawn, strict=True):
            exchange.reply.set_result(talks[place].say(completion))

    def _told(self, group: Sequence[tuple[Talk, Any]]) -> Group:
        completions, told = [], []
        for talk, episode in group:
            reward = self._reward(episode)
            if talk.transcript is None or not talk.transcript.draws:
                raise ToolError("data.verifiers: the environment ended without asking the policy")
            completions.append(talk.completion())
            check_sampled(completions[-1], talk.transcript.draws, "data.verifiers")
            messages = talk.transcript.messages
            calls = sum(len(one.get("tool_calls", ())) for one in messages)
            told.append(Told(talk.question, messages, {REWARD: reward}, num_calls=calls))
        return completions, told, [None] * len(group)

    def _reward(self, episode: Any) -> float:
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            said = "; ".join(f"{one.type}: {one.message}" for one in errors) or "no reason given"
            raise ToolError(
                f"data.verifiers: the environment failed at task {episode.task.key}: "
                f"{shown(said, 1000)}; mend it, and go on with --resume"
            )
        return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


@dataclass
class Episodes:
    """Episodes of some tasks, in an event loop of their own while it is entered."""

    environment: Environment
    tasks: Sequence[Any]
    endpoint: Endpoint
    found: dict[int, Any] = field(default_factory=dict)  # verifiers' records of finished ones

    def __enter__(self) -> Episodes:
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._all())
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(LEAVE_S)
        if self._thread.is_alive():
            log.warning(
                "data.verifiers: what ended rollouts take down is not gone after %g s; look for "
                "processes and sandboxes that they left",
                LEAVE_S,
            )
        else:
            self._loop.close()

    def check(self) -> None:
        """Raises ``ToolError`` if what runs the episodes has failed."""
        if self._error is not None:
            raise ToolError(f"data.verifiers: {shown(self._error, 1000)}") from self._error

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as group:  # of the rollouts
            self._error = group.exceptions[0]  # for the main thread to raise
        except BaseException as error:
            self._error = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            for number in range(len(self.tasks)):
                self.endpoint.over(number)

    async def _all(self) -> None:
        # A group, for its end awaits what each rollout still takes down: processes, sandboxes.
        async with self.environment.env.serving(), asyncio.TaskGroup() as group:
            for number in range(len(self.tasks)):
                group.create_task(self._one(number))

    async def _one(self, number: int) -> None:
        api = self.environment.api
        # Not verifiers' own key, which would fetch its user's settings.
        client = api.EvalClientConfig(base_url=self.endpoint.url(number), api_key_var="FXRL_NONE")
        context = api.ModelContext(model="policy", client=client)
        self.found[number] = await self.environment.env.run_episode(self.tasks[number], context)
        self.endpoint.over(number)
