"""Questions and rewards of the ``verifiers`` package: what an environment of its says before it is
played (``fxrl/rl/rollout/verifiers.py``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxrl.errors import optional, shown
from fxrl.rl.config.tables import RewardConfig
from fxrl.rl.data.rewards import Reward
from fxrl.rl.errors import DataError
from fxrl.rl.types import Row

DEFAULT_SIZE = 1000
"""Tasks taken of a taskset without end."""
REWARD = "verifiers"
"""Name of the reward, and of the column that brings it."""
HERE = {"type": "subprocess"}


@dataclass(frozen=True, slots=True)
class Environment:
    """What ``data.verifiers`` names."""

    api: Any
    env: Any
    tasks: Sequence[Any]  # a row's column ``task`` is one's number

    @classmethod
    def load(cls, given: Mapping[str, Any] | str, size: int | None) -> Environment:
        """Load an environment and at most ``size`` of its tasks. ``given`` is verifiers' table
        ``env``, or the name of a taskset, which is then played on this machine by its own harness
        or by verifiers' chat loop, ``null``."""
        what = f"data.verifiers={shown(given)}"
        api = optional("verifiers.v1", what, "[verifiers]")
        loaders = optional("verifiers.v1.utils.loaders", what)
        try:
            if isinstance(given, str):
                harness = loaders.default_harness_id(given)
                agent = {"harness": {"id": harness if harness == given else "null"}}
                table = {"taskset": {"id": given}, "agent": {**agent, "runtime": HERE}}
            else:
                table = dict(given)
            env = loaders.load_environment(loaders.resolve_env_config(table))
            endless = not env.taskset.bounded
            most = size or (DEFAULT_SIZE if endless else None)
            tasks = tuple(itertools.islice(env.taskset, most))
        # Whatever pydantic, or the environment's code, raises.
        except Exception as error:
            raise DataError(f"{what}: verifiers refuses it: {shown(error, 1000)}") from error
        return cls(api, env, tasks)

    @property
    def rows(self) -> Iterator[Row]:
        """A question each; what the policy reads is up to the harness."""
        for number, task in enumerate(self.tasks):
            text = task.data.prompt_text or task.data.name or f"task {task.key}"
            yield {"prompt": text, "task": number, "task_hash": task.hash}

    def rewards(self, rules: RewardConfig) -> list[Reward]:
        """The environment's own, of weight 1."""

        def verifiers(**columns: Any) -> list[float | None]:
            return list(columns[REWARD])

        return [Reward(REWARD, verifiers, 1.0, True, rules.timeout_s, 0, rules.on_error)]
