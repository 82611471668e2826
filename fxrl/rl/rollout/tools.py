"""Tools that the policy may call, environments that it plays in, and how their code is called.

TRL's signatures: a tool is a function with type hints and a Google docstring, plain or async; an
environment is an object whose ``reset(**columns)`` begins a rollout (what it returns goes behind
the last message) and whose other public methods are tools. ``get_reward()``, if there is one, is a
reward.

NOTE [Which thread calls, and when]
Plain functions are called one at a time, all in one thread, in the order of the rollouts: what they
share needs no lock, and the same run makes the same calls. Async ones run beside each other, in
one event loop that lives as long as the run, so a connection made in ``reset`` still works in a
tool. The calls of one message are made in its order. With ``rollout.timeout_s`` a call that does
not come back is given up: an async one is cancelled; a thread cannot be ended, so it is left
behind, and the next call gets another, as the rollout gets another environment next time.

NOTE [What a failure is]
A tool that is not there and arguments that do not fit are the policy's mistakes: it is told, as the
tool's output. A tool that raises or hangs may be either's: ``rollout.on_error`` says whether the
policy is told or the run ends. An environment that cannot begin ends the run: there is nobody to
tell. A run that ends so has saved the state before the step.

NOTE [What a resumed run repeats]
The policy's tokens, given the same answers. Environments are not in a checkpoint: each step's
rollouts begin with ``reset``, and a resumed run has made new ones. Answers are the same if they
follow from the row, the calls, and what ``reset`` sets up; not if an environment keeps something
beyond its ``reset``, or draws random numbers that it does not seed there.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from fxrl.errors import optional, shown
from fxrl.losses.options import accepted
from fxrl.losses.own_code import load_function
from fxrl.rl.config.tables import RewardConfig, RolloutConfig
from fxrl.rl.data.questions import Message, Schema
from fxrl.rl.data.rewards import GRACE_S, Reward, TimeLimitError, awaited, stack_of
from fxrl.rl.errors import BadConfigError, DataError, ToolError, defined_at, name_of, raised
from fxrl.rl.process_state import ProcessState
from fxrl.rl.types import Row, last_text

T = TypeVar("T")

NOT_TOOLS = ("reset", "get_reward")
"""An environment's methods that the policy cannot call, besides those that begin with ``_``."""


class Worker:
    """A thread that calls one function after another."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tools", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[tuple[Any, BaseException | None]]:
        """Its value, or what it raised."""
        future: Future[tuple[Any, BaseException | None]] = Future()
        future.set_running_or_notify_cancel()  # what has begun cannot be cancelled
        self._queue.put((future, function))
        return future

    def leave(self) -> str:
        """Ends the thread after the call that it hangs in, and says where that is."""
        self._queue.put(None)
        return stack_of(self._thread)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, function = item
            try:
                future.set_result((function(), None))
            # Whatever it is, it belongs to whoever asked.
            except BaseException as error:
                future.set_result((None, error))


class Caller:
    """Calls the user's functions (NOTE [Which thread calls, and when]); ``timeout_s`` is of one
    call, and ``None`` waits for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="async", daemon=True)
        self._thread.start()
        self._worker = Worker()
        self._one_at_a_time = asyncio.Lock()
        self._process = ProcessState()

    def run(self, coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run all of them concurrently. Raises ``ToolError`` for the first that raised, or for
        async code that blocks the others."""

        async def together() -> list[T | BaseException]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(together(), self._loop)
        limit = None if self.timeout_s is None else self.timeout_s + GRACE_S
        with self._process.kept():
            while True:
                try:
                    found = future.result(limit)
                    break
                except TimeoutError:
                    self._check_running()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found  # type: ignore[return-value]

    def _check_running(self) -> None:
        alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            alive.result(GRACE_S)
        except TimeoutError:
            raise ToolError(
                f"async code of a tool or an environment has not let others run for "
                f"rollout.timeout_s={self.timeout_s:g}; it must await what it waits for. It is "
                f"at\n{stack_of(self._thread).rstrip()}"
            ) from None

    async def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """What ``function`` returns; what it raises is raised here. Raises ``TimeLimitError`` if it
        took longer than ``timeout_s``."""
        if inspect.iscoroutinefunction(function):
            return await awaited(_contained(function(**arguments)), self.timeout_s)
        async with self._one_at_a_time:
            calling = self._worker.submit(lambda: function(**arguments))
            try:
                value, error = await awaited(asyncio.wrap_future(calling), self.timeout_s)
            except TimeLimitError as late:
                stack, self._worker = self._worker.leave(), Worker()
                raise TimeLimitError(late.seconds, stack) from None
        if error is not None:
            raise error if isinstance(error, Exception) else Exited(shown(error)) from error
        if inspect.isawaitable(value):  # a lambda around an async function is none itself
            return await awaited(_contained(value), self.timeout_s)
        return value


class Exited(Exception):
    """User code tried to end the process (or a thread); it goes on."""


async def _contained(awaitable: Awaitable[T]) -> T:
    """An event loop that sees ``SystemExit`` ends."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise Exited(shown(error)) from error


class Tool(NamedTuple):
    """Attributes: function: called with keywords. schema: what the policy is told of it."""

    function: Callable[..., Any]
    schema: Schema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def tool(function: Callable[..., Any]) -> Tool:
    """The function with its schema, made of its type hints and docstring by transformers."""
    make = optional("transformers", "tools").utils.get_json_schema
    try:
        return Tool(function, make(function))
    # transformers' own errors, and of objects that are no functions, whatever reading them raises.
    except Exception as error:
        name = getattr(function, "__name__", shown(function))
        raise BadConfigError(
            f"rollout: tool {name!r}{defined_at(function)} cannot be told to the model: {error}; "
            "give it a name, a type hint for each argument, and a docstring with an Args section "
            "that describes each"
        ) from error


@dataclass(slots=True)
class Episode:
    """One rollout's other side."""

    prompt: Any
    tools: Mapping[str, Tool]
    kind: str = ""  # of the environment, its name in ``rollout.environment_factory``
    environment: Any = None  # ``None`` where there are tools only
    lost: bool = False  # a call into it has not come back, so it cannot be used again
    num_calls: int = 0  # that the policy has made
    num_failed: int = 0  # of these, that found no tool, did not fit, raised or hung

    @property
    def schemas(self) -> list[Schema]:
        return [one.schema for one in self.tools.values()]


@dataclass(slots=True)
class Kind:
    """Environments that one factory makes; they are used again, as TRL does."""

    factory: Callable[[], Any]
    type: type[Any]
    schemas: Mapping[str, Schema]  # of their tools, by the method's name
    free: list[Any] = field(default_factory=list)  # environments that no rollout has


class Tools:
    """The tools and environments of a run. Creating it makes one environment of each kind; raises
    ``BadConfigError`` if something is wrong with them."""

    def __init__(self, config: RolloutConfig) -> None:
        self.on_error: Literal["tell", "stop"] = config.on_error
        self.caller = Caller(config.timeout_s)
        tools = [*map(tool, map(load_function, config.tools))]
        self.tools = {one.name: one for one in tools}
        self._named = isinstance(config.environment_factory, Mapping)
        self.kinds = {
            name: self._kind(load_function(factory)) for name, factory in config.factories.items()
        }
        of_kinds = ([*self.tools, *kind.schemas] for kind in self.kinds.values())
        for names in ([one.name for one in tools], *of_kinds):
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise BadConfigError(f"rollout: two tools are named {twice[0]!r}; rename one")

    def _kind(self, factory: Callable[[], Any]) -> Kind:
        async def make() -> Any:
            return await self.caller.call(factory)

        try:
            [environment] = self.caller.run([make()])
        # User code may raise anything.
        except Exception as error:
            raise BadConfigError(
                f"rollout.environment_factory: {name_of(factory)!r} {raised(error)}; it is called "
                "without arguments and makes an environment"
            ) from error
        cls = type(environment)
        if not callable(getattr(environment, "reset", None)):
            raise BadConfigError(
                f"rollout.environment_factory: {cls.__name__} has no method reset, which begins a "
                "rollout; add reset(self, **columns), which may return text for the prompt"
            )
        names = [
            name
            for name in dir(cls)
            if not name.startswith("_")
            and name not in NOT_TOOLS
            and inspect.isroutine(getattr(cls, name))
        ]
        schemas = {name: tool(getattr(environment, name)).schema for name in names}
        return Kind(factory, cls, schemas, [environment])

    def check_ranks(self, rewards: Sequence[Reward], num_ranks: int) -> None:
        """Refuses rewards of rank 0 that ask for all environments: these stay where they played."""
        for reward in rewards if self.kinds and num_ranks > 1 else ():
            if not reward.per_group and "environments" in (accepted(reward.function) or ()):
                raise BadConfigError(
                    f"reward {reward.name!r} asks for environments, which stay on the rank that "
                    "played in them; set reward.per_group=true"
                )

    def schemas_of(self, row: Row) -> list[Schema]:
        """Schemas of the tools that a row's prompt describes. Raises ``DataError`` if the row names
        no environment, or an unknown one."""
        kind = self.kinds.get(self._kind_of(row))
        own = {} if kind is None else kind.schemas
        return [*(one.schema for one in self.tools.values()), *own.values()]

    def _kind_of(self, row: Row) -> str:
        if not self._named:
            return ""
        if (name := row.get("environment")) not in self.kinds:
            raise DataError(
                f"its column 'environment' is {name!r}; rollout.environment_factory has "
                f"{', '.join(map(str, self.kinds))}"
            )
        return str(name)

    def begin(self, rows: Sequence[Row], prompts: Sequence[Any]) -> list[Episode]:
        """An episode per row, its prompt extended by what ``reset`` returned. Raises ``ToolError``
        if an environment cannot be made or reset."""
        return self.caller.run(
            [self._begun(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        )

    async def _begun(self, row: Row, prompt: Any) -> Episode:
        name = self._kind_of(row)
        if (kind := self.kinds.get(name)) is None:
            return Episode(prompt, self.tools)
        environment = kind.free.pop() if kind.free else None
        what = f"{kind.type.__name__}.reset"
        try:
            if environment is None:
                what = f"{name_of(kind.factory)}, the environment factory,"
                environment = await self.caller.call(kind.factory)
                what = f"{kind.type.__name__}.reset"
            takes = accepted(environment.reset)
            columns = {
                key: copy.deepcopy(value)
                for key, value in row.items()
                if (takes is None or key in takes) and not (self._named and key == "environment")
            }
            said = await self.caller.call(environment.reset, **columns)
            if said is not None and not isinstance(said, str):
                raise TypeError(f"reset returned {shown(said)}; return a text, or None")
        # User code may raise anything; the run must be saved and the environment named.
        except Exception as error:
            raise _failed(what, error, prompt, "mend it, and go on with --resume") from error
        if said is not None:
            last = prompt[-1]
            prompt = [*prompt[:-1], {**last, "content": last["content"] + said}]
        own = {
            method: Tool(getattr(environment, method), schema)
            for method, schema in kind.schemas.items()
        }
        return Episode(prompt, {**self.tools, **own}, name, environment)

    def end(self, episodes: Sequence[Episode]) -> None:
        """Takes the environments back, once nobody asks for what they hold."""
        for episode in reversed(episodes):  # so that the next step's rollouts find the same
            if episode.environment is not None and not episode.lost:
                self.kinds[episode.kind].free.append(episode.environment)

    def answers(
        self, said: Sequence[tuple[Episode, Sequence[Mapping[str, Any]]]]
    ) -> list[list[Message]]:
        """The messages that answer the calls of each episode. Raises ``ToolError`` if a tool raised
        or hung and ``rollout.on_error`` is ``"stop"``."""
        return self.caller.run([self._answered(*one) for one in said])

    async def _answered(
        self, episode: Episode, calls: Sequence[Mapping[str, Any]]
    ) -> list[Message]:
        messages = []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            output = await self._output(episode, name, arguments)
            text = output if isinstance(output, str) else _json(output)
            text = text.encode(errors="replace").decode()  # tokenizers take no half characters
            answer = {"role": "tool", "name": name, "tool_call_id": call["id"], "content": text}
            messages.append(answer)
        return messages

    async def _output(self, episode: Episode, name: str, arguments: Mapping[str, Any]) -> Any:
        episode.num_calls += 1
        if episode.lost:
            episode.num_failed += 1
            return {"error": "the environment is gone: a call into it did not come back"}
        if (found := episode.tools.get(name)) is None:
            episode.num_failed += 1
            return {"error": f"there is no tool {name!r}; there are {', '.join(episode.tools)}"}
        try:
            inspect.signature(found.function).bind(**arguments)
        except TypeError as error:
            episode.num_failed += 1
            return {"error": f"{name}: {error}"}
        try:
            return await self.caller.call(found.function, **arguments)
        # User code may raise anything; see NOTE [What a failure is].
        except Exception as error:
            episode.num_failed += 1
            # A thread is still in there; what was async is cancelled.
            hangs = isinstance(error, TimeLimitError) and bool(error.stack)
            of = getattr(found.function, "__self__", None)
            episode.lost |= hangs and of is episode.environment is not None
            if self.on_error == "stop":
                cure = 'mend it, or set rollout.on_error="tell" to let the model know'
                what = f"tool {name!r} called with {shown(dict(arguments))}"
                raise _failed(what, error, episode.prompt, cure) from error
            late = isinstance(error, TimeLimitError)
            return {"error": str(error) if late else f"{type(error).__name__}: {error}"}

    def rewards(self, rules: RewardConfig) -> list[Reward]:
        """One for each class of environments that has ``get_reward``, under its name."""
        classes = {kind.type for kind in self.kinds.values() if hasattr(kind.type, "get_reward")}

        def of(cls: type[Any]) -> Callable[..., list[Any]]:
            async def one(environment: Any) -> Any:
                if type(environment) is not cls:
                    return None
                return await self.caller.call(environment.get_reward)

            def get_reward(environments: Sequence[Any]) -> list[Any]:
                try:
                    return self.caller.run([one(environment) for environment in environments])
                except TimeLimitError as error:  # of [rollout], not of [reward]
                    raise ToolError(f"get_reward {error} (rollout.timeout_s)") from error

            return get_reward

        failing = (rules.timeout_s, rules.retries, rules.on_error)
        ordered = sorted(classes, key=lambda cls: cls.__name__)
        return [Reward(cls.__name__, of(cls), 1.0, True, *failing) for cls in ordered]


def user_code(config: RolloutConfig) -> dict[str, Callable[..., Any]]:
    """Whatever of the user's code a rollout runs, by what it is."""
    functions = {f"tool {name_of(one)}": one for one in map(load_function, config.tools)}
    named = config.factories.items()
    functions |= {f"environment {name}".strip(): load_function(one) for name, one in named}
    if config.rollout_func is not None:
        functions["rollout_func"] = load_function(config.rollout_func)
    return functions


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys that are no texts, or what holds itself
        return str(value)


def _failed(what: str, error: Exception, prompt: Any, cure: str) -> ToolError:
    if isinstance(error, TimeLimitError):
        told = f"did not come back within rollout.timeout_s={error.seconds:g}"
        told += f"; it hangs at\n{error.stack.rstrip()}\n" if error.stack else ""
    else:
        told = raised(error)
    return ToolError(f"{what} {told}, for the prompt {last_text(prompt)[:120]!r}; {cure}")
