"""What a run tells to code of yours while it goes on, and what that code may ask of it.

| event | when | its own keywords |
| --- | --- | --- |
| ``on_train_begin`` | the engine is built, a resumed run's state restored | |
| ``on_step_begin`` | before a step's rollouts | |
| ``on_rollout_end`` | what it trains on is there (drawn and judged, or taken) | ``rollout`` |
| ``on_step_end`` | its updates are made | ``logs``, so far |
| ``on_evaluate`` | held-out questions are answered; ``global_step`` 0: untrained | ``metrics`` |
| ``on_log`` | the step's line of ``metrics.jsonl`` is written; likewise | ``logs`` |
| ``on_save`` | a checkpoint is written | ``path`` |
| ``on_train_end`` | the run is over, its files are written | ``error``, ``final`` |

Each is called as ``on_x(config, state, control, *, model, tokenizer, **keywords)``, as Hugging
Face's are; take ``**kwargs`` for what you do not need. ``error`` is what a failed run failed by and
``final`` the trained model's folder; each is ``None`` otherwise. A callback that raises fails the
step as a reward does: the run's state is saved, and the error names the callback. Of several
ranks the first alone calls them; what they ask for is asked of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxrl.errors import ConfigError, FxrlError, did_you_mean
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.errors import CallbackError, raised
from fxrl.rl.types import TrainerState


@dataclass(slots=True)
class Control:
    """What a callback may ask for, by setting it to ``True``."""

    # End after this step as if it were the last, with an evaluation, a checkpoint and the model.
    should_training_stop: bool = False
    should_save: bool = False  # write a checkpoint after this step
    should_evaluate: bool = False  # answer the held-out questions after this step


class Callback:
    """Base of callbacks; an event whose method is not overridden does nothing."""

    def _nothing(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        """See the module's docstring, for all events."""

    on_train_begin = on_step_begin = on_rollout_end = on_step_end = _nothing
    on_evaluate = on_log = on_save = on_train_end = _nothing


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Refuses what would never be called."""
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigError(
                f"callbacks: {callback.__name__} is a class; give {callback.__name__}()"
            )
        named = [name for name in dir(callback) if name.startswith("on_")]
        for name in named:
            if name not in EVENTS:
                raise ConfigError(
                    f"callbacks: {type(callback).__name__}.{name}: there is no such event"
                    f"{did_you_mean(name, EVENTS)}"
                )
        if not named:
            raise ConfigError(
                f"callbacks: {type(callback).__name__} has no method for any event; they are "
                f"{', '.join(EVENTS)}"
            )


@dataclass(slots=True)
class Events:
    """The callbacks of a run, called in order."""

    config: TrainConfig
    callbacks: tuple[object, ...] = ()
    # Keywords that every event has besides its own.
    given: Mapping[str, Any] = field(default_factory=dict)
    control: Control = field(default_factory=Control)

    def __call__(self, event: str, state: TrainerState, **values: Any) -> None:
        """Calls every callback, also after one that raised."""
        failed: Exception | None = None
        for callback in self.callbacks:
            if (function := getattr(callback, event, None)) is None:
                continue
            try:
                function(self.config, state, self.control, **{**self.given, **values})
            except FxrlError as error:
                failed = failed or error
            # User code may raise anything; the run must be saved and the callback named.
            except Exception as error:
                named = CallbackError(f"callback {type(callback).__name__}.{event} {raised(error)}")
                named.__cause__ = error
                failed = failed or named
        if failed is not None:
            raise failed

    def asked(self, what: str) -> bool:
        """Whether ``should_<what>`` is set; it is reset."""
        name = f"should_{what}"
        value = bool(getattr(self.control, name))
        setattr(self.control, name, False)
        return value
