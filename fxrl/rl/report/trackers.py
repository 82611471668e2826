"""A run's numbers for looking at: TensorBoard, Weights & Biases, trackio, MLflow.

Each gets the same: the configuration at the start, then the finite numbers of every line of
``metrics.jsonl`` at its step. They are copies, so a tracker that fails later on ends no run.
Accounts, addresses and modes (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, ...) are the packages' own
business and read by them.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from fxrl.errors import optional, reason_of
from fxrl.files import refuse_links, write_text
from fxrl.rl.callbacks import Callback, Control
from fxrl.rl.config.load import as_table
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.errors import TrackerError
from fxrl.rl.report.files import Tell
from fxrl.rl.types import TrainerState

IDS = "trackers.json"
"""File in run_dir: by tracker the id of its run, which a resumed run goes on with."""


class Tracker(Callback):
    """Passes a run's numbers to a package, which a subclass calls. ``tell`` is called once if that
    fails, and the run goes on without it. Raises ``MissingPackageError`` if it is not installed."""

    name: ClassVar[str]  # in ``log_to``, and as it is installed
    module: ClassVar[str] = ""  # where that is not its name

    def __init__(self, tell: Tell) -> None:
        self._tell, self._runs = tell, False
        self.package = optional(self.module or self.name, f"log_to={self.name!r}", self.name)

    def start(self, config: TrainConfig, state: TrainerState, run_id: str | None) -> str | None:
        """Start the tracker's run, or go on with that of ``run_id``; its id, if it has one."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers of ``step``; a resumed run may write a step again."""
        raise NotImplementedError

    def close(self, *, failed: bool) -> None:
        """The run is over."""
        raise NotImplementedError

    def on_train_begin(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        file = Path(config.run_dir) / IDS
        try:
            ids = json.loads(file.read_text()) if file.is_file() else {}
            if run_id := self.start(config, state, ids.get(self.name)):
                write_text(file, json.dumps(ids | {self.name: run_id}) + "\n")
        # The packages raise whatever their many clients raise; it means the same to the user.
        except Exception as error:
            raise TrackerError(
                f"log_to={self.name!r}: its run cannot be started: {reason_of(error)}; log in, or "
                f"leave {self.name} out of log_to"
            ) from error
        self._runs = True

    def on_log(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        values = {
            name: float(value)
            for name, value in kwargs["logs"].items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        self._try(lambda: self.write(state.global_step, values))

    def on_train_end(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        self._try(lambda: self.close(failed=kwargs["error"] is not None))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            if self._runs:
                action()
        except Exception as error:
            self._runs = False
            self._tell(
                f"{self.name}: {reason_of(error)}; nothing more goes there, metrics.jsonl has the "
                "numbers"
            )


class TensorBoard(Tracker):
    """Events in ``run_dir/tensorboard``; those of steps that come again are purged."""

    name, module = "tensorboard", "torch.utils.tensorboard"

    def start(self, config: TrainConfig, state: TrainerState, run_id: str | None) -> None:
        self._folder = refuse_links(Path(config.run_dir) / "tensorboard")
        for file in self._folder.glob("*"):  # the writer would go through one of its next name
            refuse_links(file)
        first = state.global_step + 1
        self._writer = self.package.SummaryWriter(str(self._folder), purge_step=first)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # else the writer's thread raises
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class Wandb(Tracker):
    """A run of Weights & Biases, called as run_dir.

    NOTE [Steps are a metric of their own]
    wandb drops what is logged at a step below its last one. A run that goes back to an older
    checkpoint would lose its curve there, so the step is logged as a number and made the axis.
    """

    name = "wandb"

    def start(self, config: TrainConfig, state: TrainerState, run_id: str | None) -> str:
        self._run = self.package.init(
            project=config.project,
            name=Path(config.run_dir).name,
            dir=config.run_dir,
            config=as_table(config),
            id=run_id,
            resume="allow",
            allow_val_change=True,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(Tracker):
    """A run of trackio, called as run_dir with a mark of its own behind: trackio goes on with the
    newest run of a name, and folders of several runs may have one name."""

    name = "trackio"

    def start(self, config: TrainConfig, state: TrainerState, run_id: str | None) -> str:
        name = Path(config.run_dir).name
        resumed = run_id is not None or state.global_step > 0
        named = run_id or (name if resumed else f"{name}-{secrets.token_hex(3)}")
        self._run = self.package.init(
            project=config.project,
            name=named,
            config=as_table(config),
            resume="allow" if resumed else "never",
        )
        return named

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, called as run_dir; the configuration is its artifact ``config.json``."""

    name = "mlflow"

    def start(self, config: TrainConfig, state: TrainerState, run_id: str | None) -> str:
        self.package.set_experiment(config.project)
        nested = self.package.active_run() is not None
        name = Path(config.run_dir).name
        run = self.package.start_run(run_id=run_id, run_name=name, nested=nested)
        self._run_id = str(run.info.run_id)
        self.package.log_dict(as_table(config), "config.json", run_id=self._run_id)
        return self._run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.package.log_metrics(dict(values), step=step, run_id=self._run_id)

    def close(self, *, failed: bool) -> None:
        self.package.end_run("FAILED" if failed else "FINISHED")


def trackers(config: TrainConfig, tell: Tell) -> list[Tracker]:
    """A tracker, not yet started, for each name in ``log_to``. Raises ``MissingPackageError`` if a
    package is not installed."""
    kinds = {kind.name: kind for kind in (TensorBoard, Wandb, Trackio, MLflow)}
    names = [n for n in dict.fromkeys(config.log_to) if config.tensorboard or n != "tensorboard"]
    return [kinds[name](tell) for name in names]
