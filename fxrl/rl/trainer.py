"""The loop: roll out, score, update, write down, checkpoint."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxrl.rl import checkpoint
from fxrl.rl.batching import make_batches, padding_fraction, plan_micro_batches
from fxrl.rl.config import TrainConfig
from fxrl.rl.evaluate import evaluate
from fxrl.rl.interrupt import StopRequest
from fxrl.rl.load_config import as_table
from fxrl.rl.metrics import COMPLETIONS, METRICS, JsonLines, TensorBoard
from fxrl.rl.progress import Reporter
from fxrl.rl.rollout import TrainerState
from fxrl.rl.setup import Parts
from fxrl.rl.types import Batch, Metrics, Rollout


class Trainer:
    """Runs the steps of one run; ``done`` counts them.

    Args:
        config: the run's.
        parts: the run's, as at step 0.
        run_dir: exists.

    NOTE [What a failing step leaves]
    Until its first optimizer update a step changes nothing but random states and the data position.
    They are noted when it starts, so a reward function that raises in step 7 leaves a checkpoint of
    step 6, and the resumed run draws the same completions of step 7 again.
    """

    def __init__(self, config: TrainConfig, parts: Parts, run_dir: Path) -> None:
        self.config, self.parts, self.run_dir = config, parts, run_dir
        self.done = 0
        self.num_tokens = 0
        self.initial: Metrics = {}
        self._start_of_step: dict[str, Any] = {}
        self._updated = False
        self._reported = False

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: it is damaged or of another run.
        """
        saved = checkpoint.read_trainer(path)
        checkpoint.check_same_run(path, saved["config"], as_table(self.config))
        optimizer, state = checkpoint.load_checkpoint(path, self.parts.model)
        self.parts.updater.optimizer.load_state_dict(optimizer["optimizer"])
        self.parts.updater.schedule.load_state_dict(optimizer["schedule"])
        self.parts.engine.load_state_dict(state["engine"])
        checkpoint.set_random_state(state["random"])
        self.done, self.num_tokens = saved["step"], saved["num_tokens"]
        self.parts.stream.position = saved["position"]
        self.parts.updater.num_skipped = saved["num_skipped"]
        self.parts.updater.num_skipped_in_a_row = saved["num_skipped_in_a_row"]
        self.initial = saved["initial"]

    def run(self, reporter: Reporter, stop: StopRequest) -> None:
        """Steps until ``config.steps`` or until ``stop`` is set; then saves.

        Raises:
            FxrlError: a step failed; the state before it is saved.
        """
        config = self.config
        metrics = JsonLines(self.run_dir / METRICS, self.done, self._as_in_one_run)
        completions = JsonLines(self.run_dir / COMPLETIONS, self.done)
        board = TensorBoard(self.run_dir, self.done + 1) if config.tensorboard else None
        try:
            if self.done == 0 and config.steps > 0:
                self._evaluate_untrained(board)
            while self.done < config.steps and not stop:
                record, rollout = self._guarded_step()
                metrics.write(record)
                samples = self._samples(rollout)
                for sample in samples:
                    completions.write({"step": self.done, **sample})
                if board is not None:
                    board.write(self.done, record)
                self._tell_report(reporter)
                reporter.step(record, samples)
                last = self.done == config.steps or bool(stop)
                if last or (config.save_every and self.done % config.save_every == 0):
                    self.save()
        finally:
            metrics.close()
            completions.close()
            if board is not None:
                board.close()

    def save(self) -> Path:
        """Writes a checkpoint of the present state."""
        return self._save(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "engine": self.parts.engine.state_dict(),
            "random": checkpoint.random_state(),
            "position": self.parts.stream.position,
        }

    def _save(self, state: Mapping[str, Any]) -> Path:
        updater = self.parts.updater
        return checkpoint.save_checkpoint(
            self.run_dir,
            self.done,
            model=self.parts.model,
            optimizer={
                "optimizer": updater.optimizer.state_dict(),
                "schedule": updater.schedule.state_dict(),
            },
            state={name: state[name] for name in ("engine", "random")},
            trainer={
                "position": state["position"],
                "num_tokens": self.num_tokens,
                "num_skipped": updater.num_skipped,
                "num_skipped_in_a_row": updater.num_skipped_in_a_row,
                "initial": self.initial,
                "config": as_table(self.config),
            },
            keep=self.config.keep_checkpoints,
        )

    def _guarded_step(self) -> tuple[dict[str, Any], Rollout]:
        """One step; if it fails before it changed a weight, the state before it is saved."""
        self._start_of_step, self._updated = self._state(), False
        try:
            return self._step()
        except Exception as error:
            if not self._updated:
                saved = self._save(self._start_of_step)
                error.add_note(f"step {self.done + 1} failed; the state before it is in {saved}")
            raise

    def _step(self) -> tuple[dict[str, Any], Rollout]:
        start = time.perf_counter()
        parts, config = self.parts, self.config
        number = self.done + 1
        rows = [parts.questions.split.train[i] for i in parts.stream.take(config.prompts_per_step)]
        rollout = parts.roller.rollout(rows, config, self._trainer_state(number))
        train_start = time.perf_counter()
        with parts.engine.standby():
            batches = self._batches(rollout)
            updates = []
            for _ in range(config.num_iterations):
                updates.append(parts.updater.update(batches, number))
                self._updated = True
        parts.engine.update_weights(policy_version=parts.engine.policy_version + 1)
        self.num_tokens += rollout.num_tokens
        end = time.perf_counter()
        self.done = number
        record: dict[str, Any] = {"step": number} | mean_of(updates) | rollout.metrics
        record |= {"num_tokens": self.num_tokens, "epoch": parts.stream.epoch}
        record |= self._evaluation(number)
        record |= rollout.times
        record |= {
            "time/train": end - train_start,
            "step_time": end - start,
            "tokens_per_second": rollout.num_completion_tokens / (end - start),
        }
        if torch.cuda.is_available():
            record["memory/peak_bytes"] = torch.cuda.max_memory_allocated()
        return record, rollout

    def _batches(self, rollout: Rollout) -> list[Batch]:
        """Micro-batches with the log-probabilities that the loss compares with."""
        lengths = [(len(c.prompt_token_ids), len(c.token_ids)) for c in rollout.completions]
        plan = plan_micro_batches(lengths, self.config.micro_batch_tokens)
        parameter = next(self.parts.model.parameters())
        batches = make_batches(
            rollout.completions,
            rollout.advantages,
            plan,
            pad_token_id=self.parts.tokenizer.pad_token_id,
            device=parameter.device,
            dtype=torch.promote_types(parameter.dtype, torch.float32),
        )
        self._padding = padding_fraction(lengths, plan)
        for batch in batches:
            if self.parts.old_policy is not None:
                batch["old_logps"] = self.parts.old_policy(batch)
            if self.parts.reference is not None:
                batch["ref_logps"] = self.parts.reference(batch)
        return batches

    def _trainer_state(self, step: int) -> TrainerState:
        return TrainerState(step, self.config.steps, self.parts.stream.epoch)

    def _evaluation(self, number: int) -> Metrics:
        found = self._evaluate() if self._evaluation_due(number) else {}
        return self.initial | found if number == 1 else found

    def _evaluation_due(self, number: int) -> bool:
        config = self.config.eval
        due = number == self.config.steps or (config.every and number % config.every == 0)
        return bool(config.size and due)

    def _as_in_one_run(self, line: dict[str, Any]) -> dict[str, Any]:
        """Without the evaluation after what was the last step until ``steps`` was raised."""
        if self._evaluation_due(line["step"]):
            return line
        initial = self.initial if line["step"] == 1 else {}
        return {k: v for k, v in line.items() if not k.startswith("eval/") or k in initial}

    def _evaluate(self) -> Metrics:
        parts = self.parts
        return evaluate(
            parts.roller,
            parts.questions.split.held_out,
            self.config.eval,
            self.config.data.answer,
            self._trainer_state(self.done),
        )

    def _evaluate_untrained(self, board: TensorBoard | None) -> None:
        """Before the first step; written into its line as ``eval/initial_*``."""
        if not self.config.eval.size:
            return
        found = self._evaluate()
        if board is not None:
            board.write(0, found)
        self.initial = {
            "eval/initial_accuracy": found["eval/accuracy"],
            "eval/majority_baseline": found["eval/majority_baseline"],
        }

    def _tell_report(self, reporter: Reporter) -> None:
        """Once per process, when the first step has been captured."""
        report = getattr(self.parts.updater.step, "report", None)
        if report is not None and not self._reported:
            reporter.report(report)
        self._reported = True

    def _samples(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Some completions, spread over the step's prompts."""
        total, wanted = len(rollout.texts), self.config.log_completions
        count = min(wanted, total)
        picked = [i * total // count for i in range(count)]
        return [
            {
                "question": _last_text(rollout.prompts[i]),
                "prompt": rollout.prompts[i],
                "completion": rollout.texts[i],
                "reward": rollout.rewards[i] if math.isfinite(rollout.rewards[i]) else None,
                "advantage": rollout.advantages[i],
                **{f"rewards/{name}": v[i] for name, v in rollout.by_function.items()},
            }
            for i in picked
        ]


def mean_of(updates: list[Metrics]) -> Metrics:
    """Metrics of one step's updates as one; ``None`` where no update has a value."""
    if len(updates) == 1:
        return updates[0]
    merged: Metrics = {}
    for name in updates[0]:
        values = [v for update in updates if (v := update.get(name)) is not None]
        merged[name] = statistics.fmean(values) if values else None
    return merged


def _last_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
