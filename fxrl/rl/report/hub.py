"""``push_to_hub``: the trained model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fxrl.errors import optional, reason_of
from fxrl.models.hf import save_pretrained
from fxrl.rl.callbacks import Callback, Control
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.errors import HubError
from fxrl.rl.report.files import Tell
from fxrl.rl.types import TrainerState


class HubPush(Callback):
    """Pushes to ``user/name`` at the end, and at every save where ``hub_strategy`` says so.

    The repository is made if it is missing; ``HubError`` says what to do if that fails. ``tell``
    hears of a push during the run that failed: the next save pushes again.
    """

    def __init__(self, repo: str, tell: Tell) -> None:
        self.repo, self._tell = repo, tell
        self._hub = optional("huggingface_hub", f"push_to_hub={repo!r}")
        try:
            self._hub.create_repo(repo, exist_ok=True)
        # Its errors have no common class; all of them mean that nothing could be pushed.
        except Exception as error:
            raise HubError(
                f"push_to_hub={repo!r}: {reason_of(error)}; log in with `hf auth login`, or leave "
                "push_to_hub out and push the run's folder final/ later"
            ) from error

    def on_save(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        if config.hub_strategy != "every_save":
            return
        try:
            with TemporaryDirectory() as folder:
                save_pretrained(kwargs["model"], Path(folder))
                kwargs["tokenizer"].save_pretrained(folder)
                self._push(Path(folder), f"step {state.global_step}")
        except Exception as error:
            self._tell(f"push_to_hub={self.repo!r}: {reason_of(error)}; the run goes on")

    def on_train_end(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        final: Path | None = kwargs["final"]
        if final is None:
            return
        try:
            self._push(final, f"trained for {state.global_step} steps")
        except Exception as error:
            raise HubError(
                f"the run is complete, but could not be pushed: push_to_hub={self.repo!r}: "
                f"{reason_of(error)}; its model is in {final}, push it with `hf upload {self.repo} "
                f"{final}`"
            ) from error

    def _push(self, folder: Path, message: str) -> None:
        self._hub.upload_folder(repo_id=self.repo, folder_path=folder, commit_message=message)
