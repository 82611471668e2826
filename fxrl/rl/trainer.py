"""The trainer: ``fxrl train`` for those who write Python."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from torch import nn

from fxrl.errors import ConfigError
from fxrl.rl.builtin_rewards import RewardFunction
from fxrl.rl.callbacks import check_callbacks
from fxrl.rl.config.load import config_of
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.loop import run as loop
from fxrl.rl.loop.prepare import Start, prepare
from fxrl.rl.loop.run import Outcome
from fxrl.rl.report.progress import READING, Reporter, reporter_on

RUN_DIR = "runs/python"
"""Where a run goes whose configuration does not say."""


class Trainer:
    """Trains a model on rewards of its own completions.

        def short(completions, completion_ids, **columns):
            return [-len(ids) for ids in completion_ids]

        trainer = Trainer("Qwen/Qwen3-0.6B", short, rows, {"steps": 50, "optim": {"lr": 1e-5}})
        result = trainer.train()

    It is what ``fxrl train`` runs: the same files in ``run_dir``, the same checks, and a run that
    one of them stopped can be resumed by the other where the configurations are equal.

    Args:
        model: a hub id, a folder, ``tiny:<kind>``, or a causal LM of transformers or PEFT itself.
            That keeps its dtype, and what of it requires grad is trained (``model.lora`` puts an
            adapter on it); ``engine="vllm"`` takes names alone.
        rewards: a function with TRL's signature, a name of ``reward.functions``, or a list of them
            (``examples/config.md``: what they get and may return); none for a loss that learns
            from the data as they are.
        data: dicts of columns, one a question: a list, another iterable, or a
            ``datasets.Dataset``. Rows are read once; of what has no end ``data.size`` are taken.
        config: a ``TrainConfig``, or its tables as nested dicts. What the arguments above give
            replaces ``model.id``, ``reward.functions`` and ``data``'s source, and may be left out.
        callbacks: objects with methods named as ``fxrl.rl.callbacks`` says.
        tokenizer: of a model that does not say where it came from.
        tools: functions that the policy may call; see ``RolloutConfig``, as for the next two.
        environment_factory: makes environments, such as their class; or several by name.
        rollout_func: plays the rollouts itself.

    Attributes:
        config: all of it.

    Raises:
        ConfigError: something in them is wrong; all mistakes at once.
    """

    def __init__(
        self,
        model: str | nn.Module | None = None,
        rewards: str | RewardFunction | Sequence[str | RewardFunction] | None = None,
        data: Iterable[Mapping[str, Any]] | None = None,
        config: TrainConfig | Mapping[str, Any] | None = None,
        callbacks: Sequence[object] = (),
        *,
        tokenizer: Any = None,
        tools: Sequence[str | Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
    ) -> None:
        check_callbacks(callbacks)
        given: dict[str, dict[str, Any]] = {"model": {}, "reward": {}, "data": {}}
        turns = {"environment_factory": environment_factory, "rollout_func": rollout_func}
        given["rollout"] = {name: value for name, value in turns.items() if value is not None}
        if tools:
            given["rollout"]["tools"] = tuple(tools)
        if model is not None:
            given["model"] = {"id": model}
        if isinstance(model, nn.Module):
            given["model"]["dtype"] = _dtype(model)
            if tokenizer is None and not getattr(model.config, "_name_or_path", ""):
                raise ConfigError("the model does not say where it came from; give its tokenizer")
        if rewards is not None:
            one = isinstance(rewards, str) or callable(rewards)
            given["reward"] = {"functions": (rewards,) if one else tuple(rewards)}  # type: ignore[arg-type]
        if data is not None:
            size = _size(config)
            given["data"] = dict.fromkeys(("path", "dataset", "reasoning_gym", "verifiers"))
            given["data"]["rows"] = _rows(data, size)
        self.config = _completed(config, given)
        if tokenizer is not None and tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere
        self.callbacks, self.tokenizer = tuple(callbacks), tokenizer
        self._trained_in_place = False
        self._console = Console(quiet=os.environ.get("RANK", "0") != "0")  # of several, one talks

    def train(
        self, *, resume: str | None = None, accept_changes: bool = False, overwrite: bool = False
    ) -> Outcome:
        """Runs all steps. Ctrl-C and SIGTERM end it after the step that runs, its state saved.

        A model that was given itself is trained in place, so it is no longer what the run began
        with: to resume, load it anew and make another ``Trainer``. One that was given by its name
        is loaded at each call.

        Args:
            resume: ``""``: go on at the last checkpoint of ``run_dir`` (from the start if the run
                has none yet); ``"sound"``: at the last one that is not damaged; a path: at that
                one, in a new branch where it is not the last; ``None``: a new run.
            accept_changes: resume although data, rewards or the base model are others than before.
            overwrite: a run that ``run_dir`` holds is moved aside.

        Raises:
            FxrlError: checkpoint or data are wrong, which is found before the model is loaded; or
                the run failed, its state saved where possible.
            ConfigError: a second call with a model that was given itself.
        """
        start = Start(resume, accept_changes, overwrite)
        with (
            reporter_on(self._console, json=False) as reporter,
            self.prepared(reporter, start) as run,
        ):
            return run()

    @contextmanager
    def prepared(self, reporter: Reporter, start: Start) -> Iterator[Callable[[], Outcome]]:
        """All that ``train`` does before it loads the model; the rest is what it yields. No other
        run can have ``run_dir`` in the block."""
        if self._trained_in_place:
            raise ConfigError(
                "this model was trained in place by an earlier call; load it anew and give it to "
                "another Trainer, or give its name"
            )
        prepared = prepare(
            self.config, reporter, start, callbacks=self.callbacks, tokenizer=self.tokenizer
        )
        with ExitStack() as held:
            with reporter.stage(READING):
                task = held.enter_context(prepared)

            def run() -> Outcome:
                self._trained_in_place = isinstance(self.config.model.id, nn.Module)
                return loop.run(task, reporter)

            yield run


def _completed(
    config: TrainConfig | Mapping[str, Any] | None, given: Mapping[str, Mapping[str, Any]]
) -> TrainConfig:
    if isinstance(config, TrainConfig):
        tables = {
            name: dataclasses.replace(getattr(config, name), **values)
            for name, values in given.items()
            if values
        }
        config = dataclasses.replace(config, **tables)
        return config if config.run_dir else dataclasses.replace(config, run_dir=RUN_DIR)
    table = dict(config or {})
    for name, values in given.items():
        if values and isinstance(table.get(name, {}), Mapping):
            table[name] = {**table.get(name, {}), **values}
    return config_of(table, "Trainer", RUN_DIR)


def _dtype(model: nn.Module) -> str:
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model is a {type(model).__name__}, which has no save_pretrained; give a causal LM of "
            "transformers or PEFT, or its name"
        )
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _size(config: TrainConfig | Mapping[str, Any] | None) -> int | None:
    """``data.size``; a wrong one is told with the other mistakes."""
    if isinstance(config, TrainConfig):
        return config.data.size
    table = (config or {}).get("data", {})
    size = table.get("size") if isinstance(table, Mapping) else None
    return size if isinstance(size, int) and size >= 0 else None


def _rows(data: Iterable[Mapping[str, Any]], size: int | None) -> tuple[dict[str, Any], ...]:
    rows = tuple(itertools.islice(data, size))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"data is a {type(data).__name__} whose entry {number} is a {type(row).__name__}; "
                "give dicts of columns (of a DatasetDict, one split)"
            )
    return tuple(dict(row) for row in rows)
