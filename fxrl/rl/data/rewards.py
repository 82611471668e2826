"""Reward functions: TRL's signature, four built in; how they are called, and what is checked.

A reward is called once a step as ``f(prompts=..., completions=..., completion_ids=..., **columns)``
with one entry per completion and returns one float, or ``None`` for "does not apply", per
completion. A function without ``**kwargs`` gets the arguments it names. Those built in judge each
completion by itself, so they are called for each prompt's completions as soon as these are there,
and so are your own with ``reward.per_group``.

NOTE [A reward sees the run and cannot touch it]
Each call gets copies of rows, prompts and completions, so what a function does to its arguments
reaches neither another function nor the next epoch. Whatever it raises, ``sys.exit`` included, is a
failure of that function; only a KeyboardInterrupt ends the run.

NOTE [Functions that hang]
Nothing in a process can stop a function that hangs. With a time limit it runs in a thread of its
own; after the limit the thread is left behind, and the call counts as failed. An async function is
cancelled first, so one that only waits goes away cleanly.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from fxrl.errors import shown
from fxrl.losses.options import accepted
from fxrl.losses.own_code import load_function
from fxrl.rl.builtin_rewards import BUILT_IN, RewardFunction, ScoreAnswer
from fxrl.rl.config.named import reward_name
from fxrl.rl.config.tables import RewardConfig
from fxrl.rl.errors import BadConfigError, RewardError, called, defined_at, raised, raised_at
from fxrl.rl.process_state import ProcessState

T = TypeVar("T")


class TimeLimitError(Exception):
    """The call has not come back; ``stack`` says where it hangs."""

    def __init__(self, seconds: float, stack: str) -> None:
        super().__init__(f"did not come back within {seconds:g} s")
        self.seconds, self.stack = seconds, stack


class Background(Generic[T]):
    """A call that runs in a thread of its own.

    The thread is a daemon: nothing can end a hanging call from outside, and it must not keep the
    process from ending. (``concurrent.futures`` joins its threads at exit.)
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function, self._done = function, Future[T]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done.set_result(self._function())
        # Whatever it is, it belongs to whoever asks for the result.
        except BaseException as error:
            self._done.set_exception(error)

    def result(self, seconds: float | None = None) -> T:
        """What the function returned, or raised. Raises ``TimeLimitError`` if it is still running
        after ``seconds``."""
        if seconds is not None and wait([self._done], seconds).not_done:
            raise TimeLimitError(seconds, stack_of(self._thread))
        return self._done.result()

    def check(self) -> None:
        """Raises what the function has raised, if it has by now."""
        if self._done.done():
            self._done.result()


def stack_of(thread: threading.Thread) -> str:
    """The innermost calls of the user's code that a thread is in; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return "".join(traceback.format_list(called(traceback.extract_stack(frame))[-6:]))


GRACE_S = 1.0
"""An async function gets so long to be cancelled before its thread is given up."""


class CallFailed(RewardError):
    """A call raised or hung; another try may do better."""


@dataclass(frozen=True, slots=True)
class Reward:
    name: str  # as in metric keys ``rewards/<name>/mean``
    function: RewardFunction  # TRL's signature; may be async
    weight: float
    per_group: bool = False  # it may be called for each prompt's completions by themselves
    timeout_s: float | None = None  # seconds of one call; ``None`` waits for ever
    retries: int = 0  # further calls after one that raised or hung
    # After the last try, ``stop`` the run, or ``skip``: these completions get no value from it.
    on_error: Literal["stop", "skip"] = "stop"
    # What was skipped, in words; the loop empties it.
    failures: list[str] = field(default_factory=list)
    process: ProcessState = field(default_factory=ProcessState)  # what the function may not change

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, or an object that is called as one."""
        function = getattr(self.function, "func", self.function)
        called = type(function).__call__
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    def __call__(self, num: int, arguments: Mapping[str, Any]) -> list[float | None]:
        """``num`` values. Raises ``RewardError`` if the function raised or hung (after all retries,
        and if that stops the run), or returned something else."""
        tries = self.retries + 1
        for left in reversed(range(tries)):
            try:
                return self._once(num, arguments)
            except CallFailed as error:
                if left:
                    continue
                after = f" ({tries} times)" if tries > 1 else ""
                if self.on_error == "stop":
                    raise RewardError(f"{error}{after}") from error.__cause__
                self.failures.append(f"{error}{after}; {num} completions get no value from it")
        return [None] * num

    def _once(self, num: int, arguments: Mapping[str, Any]) -> list[float | None]:
        known = accepted(self.function)
        given = {k: v for k, v in arguments.items() if known is None or k in known}
        limit = self.timeout_s
        outer = None if limit is None else limit + (GRACE_S if self.is_async else 0.0)

        process = os.getpid()

        def call() -> Any:
            try:
                values = self.function(**_copied(given))
                return _run(awaited(values, limit)) if inspect.isawaitable(values) else values
            finally:
                if os.getpid() != process:  # forked by the function, and no trainer
                    os._exit(1)

        try:
            # By who waits: a thread that is left behind would put things back under others' feet.
            with self.process.kept():
                name = f"reward {self.name}"
                values = call() if outer is None else Background(call, name).result(outer)
        except TimeLimitError as error:
            raise CallFailed(
                f"reward {self.name!r} did not come back within reward.timeout_s={limit:g}"
                + (f"; it hangs at\n{error.stack.rstrip()}" if error.stack else "")
            ) from error
        except KeyboardInterrupt:
            raise
        # User code may raise anything; the run must be saved and the function named.
        except BaseException as error:
            place = "" if raised_at(error) else defined_at(self.function)
            raise CallFailed(f"reward {self.name!r} {raised(error)}{place}") from error
        try:
            return _checked(values, num)
        # Objects of the user's may raise anything where they are read.
        except Exception as error:
            told = f"{error}" if isinstance(error, ValueError) else f"what raises {shown(error)}"
            place = defined_at(self.function)
            raise RewardError(f"reward {self.name!r} returned {told}{place}") from error


GIVEN = ("prompts", "completions", "completion_ids", "rows", "trainer_state")
"""What rewards get besides the columns of the data."""


def check_arguments(rewards: Sequence[Reward], columns: Iterable[str]) -> None:
    """Refuses, by a ``BadConfigError``, a function that asks for what no call would give it."""
    names = (*GIVEN, *columns)
    for reward in rewards:
        for one in inspect.signature(reward.function).parameters.values():
            if one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            if one.name not in names or one.kind is one.POSITIONAL_ONLY:
                raise BadConfigError(
                    f"reward {reward.name!r}{defined_at(reward.function)} wants {one.name!r}; "
                    f"rewards are called by keyword, with {', '.join(names)}"
                )


def check_answer(config: RewardConfig, answer: str, columns: Collection[str]) -> None:
    """Refuses a built-in reward that compares with a column that no row has. Raises
    ``BadConfigError``."""
    for name in config.functions:
        factory = BUILT_IN.get(name) if isinstance(name, str) else None
        compares = factory is not None and "answer" in (accepted(factory) or ())
        if compares and answer not in columns:
            there = ", ".join(columns) or "none but the prompt"
            raise BadConfigError(
                f"reward {name!r} compares with column {answer!r}, and the data have {there}; name "
                "the right answer's column with data.answer"
            )


def _copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy; of token ids list by list, as each of a million costs ``deepcopy`` 0.5 us.
    Environments hold what cannot be copied, and are theirs who ask for them."""
    memo = {id(ids): copy.copy(ids) for ids in arguments.get("completion_ids", ())}
    memo |= {id(one): one for one in arguments.get("environments", ())}
    return copy.deepcopy(dict(arguments), memo)


async def awaited(awaitable: Any, limit: float | None) -> Any:
    """What it comes to. Raises ``TimeLimitError``, and cancels it, after ``limit`` seconds."""
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait([task], timeout=limit)
    if not done:
        task.cancel()
        raise TimeLimitError(limit or 0.0, "")
    return task.result()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``; in a thread of its own where this one runs a loop, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return Background(lambda: asyncio.run(coroutine), "event loop").result()


def call_all(
    rewards: Sequence[Reward], num: int, arguments: Mapping[str, Any]
) -> dict[str, list[float | None]]:
    """Values of all functions; async ones run concurrently with each other and with the others.
    Raises ``RewardError`` as ``Reward`` does."""
    waiting = {
        reward.name: Background(
            lambda reward=reward: reward(num, arguments),  # type: ignore[misc]
            f"async reward {reward.name}",
        )
        for reward in rewards
        if reward.is_async and len(rewards) > 1
    }
    values = {r.name: r(num, arguments) for r in rewards if r.name not in waiting}
    values |= {name: call.result() for name, call in waiting.items()}
    return {reward.name: values[reward.name] for reward in rewards}


LARGEST = 1e100
"""Beyond it a mean or a standard deviation of rewards may leave the range of a float."""


def _checked(values: Any, num: int) -> list[float | None]:
    """``values`` as ``num`` floats or ``None``. Raises ``ValueError``, beginning with what they
    are, if they are something else."""
    if hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"{type(values).__name__}; it must return a list with one float or None per completion"
        )
    if len(values) != num:
        raise ValueError(f"{len(values)} values for {num} completions; return one each")
    checked: list[float | None] = []
    for index, value in enumerate(values):
        scalar = math.prod(getattr(value, "shape", (0,))) == 1  # of NumPy or PyTorch
        plain = value.item() if scalar else value
        number = isinstance(plain, int | float) and abs(plain) <= LARGEST  # False for NaN
        if plain is not None and not number:
            raise ValueError(
                f"{shown(value)} for completion {index}; return a finite float of at most "
                f"{LARGEST:g}, or None where the reward does not apply"
            )
        checked.append(None if plain is None else float(plain))
    return checked


def combine(values: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """[functions][completions] summed by weight; NaN where every function said ``None``."""
    totals = []
    for row in zip(*values, strict=True):
        said = [w * value for w, value in zip(weights, row, strict=True) if value is not None]
        totals.append(sum(said) if said else math.nan)
        if said and not abs(totals[-1]) <= LARGEST:
            raise RewardError(
                f"the rewards {list(row)} of completion {len(totals) - 1}, times reward.weights="
                f"{list(weights)}, add up to {totals[-1]:g}; {LARGEST:g} is the most there may be"
            )
    return totals


def build_rewards(config: RewardConfig, answer: str, score: ScoreAnswer | None) -> list[Reward]:
    """The run's rewards; keywords of a ``module:function`` reach it as further columns."""
    rules = (config.timeout_s, config.retries, config.on_error)
    ours = {"extract": config.extract, "answer": answer, "score": score}
    rewards: list[Reward] = []
    weights = config.weights or [1.0] * len(config.functions)
    for given, weight in zip(config.functions, weights, strict=True):
        name = reward_name(given)
        keywords = dict(config.params.get(name, {}))
        if isinstance(given, str) and given in BUILT_IN:
            factory = BUILT_IN[name]
            takes = accepted(factory) or ()
            function = factory(**{k: v for k, v in ours.items() if k in takes}, **keywords)
            rewards.append(Reward(name, function, weight, True, *rules))
        else:
            function = functools.partial(load_function(given), **keywords)
            short = name.rpartition(":")[2]
            if short in config.functions or short in {reward.name for reward in rewards}:
                # "a:f" and "b:f", or two lambdas
                short = name if name != short else f"{short}_{len(rewards) + 1}"
            rewards.append(Reward(short, function, weight, config.per_group, *rules))
    return rewards
