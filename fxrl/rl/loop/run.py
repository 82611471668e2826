"""One run, from its configuration to its files; ``fxrl.rl.train`` is its front door."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fxrl import durable
from fxrl.errors import did_you_mean
from fxrl.models.hf import no_progress_bars
from fxrl.rl.config.dtype import settle
from fxrl.rl.config.load import as_table, load_config
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.errors import BadConfigError
from fxrl.rl.loop import checkpoint, store
from fxrl.rl.loop.build import Questions, build_parts, pick_device, read_questions, seed_everything
from fxrl.rl.loop.fingerprint import check_unchanged
from fxrl.rl.loop.interrupt import StopRequest, stop_on_signal
from fxrl.rl.loop.lock import hold
from fxrl.rl.loop.outlook import outlook
from fxrl.rl.loop.trainer import Trainer
from fxrl.rl.report.files import METRICS, Tell, read_lines, try_to_write, why
from fxrl.rl.report.plots import plot_curves, plot_times
from fxrl.rl.report.progress import Reporter

CONFIG = "config.json"


class Task(NamedTuple):
    """What ``prepare`` has found.

    Attributes:
        config: complete.
        questions: of the run.
        found: the checkpoint to go on from.
        accept_changes: goes on with what has changed since, if it is no configuration.
    """

    config: TrainConfig
    questions: Questions
    found: Path | None
    accept_changes: bool


@contextmanager
def prepare(
    config_path: str,
    overrides: Sequence[str],
    resume: str | None,
    reporter: Reporter,
    *,
    accept_changes: bool = False,
) -> Iterator[Task]:
    """Reads configuration, checkpoint and data; loads no model. Holds ``run_dir`` while it is open.

    Raises:
        FxrlError: something in them is wrong, or another run has ``run_dir``.
    """
    config = load_config(config_path, overrides)
    if accept_changes and resume is None:
        raise BadConfigError("--accept-changes says nothing without --resume")
    if resume in ("", checkpoint.SOUND):
        _check_begun(Path(config.run_dir))
    with hold(Path(config.run_dir), reporter.message):
        found = _where_to_start(config, resume, reporter.message)
        saved = None if found is None else checkpoint.read_trainer(found)
        model = settle(
            config.model,
            pick_device(config.model.device),
            None if saved is None else saved["config"]["model"],
            reporter.message,
        )
        config = dataclasses.replace(config, model=model)
        if found is not None and saved is not None:
            checkpoint.check_same_run(found, saved["config"], as_table(config))
        questions = read_questions(config)
        if found is not None and saved is not None:
            check_unchanged(
                found, saved["fingerprints"], questions.fingerprints, accept=accept_changes
            )
        yield Task(config, questions, found, accept_changes)


def run(task: Task, reporter: Reporter) -> int:
    """Trains, and writes everything into the run's folder.

    Returns:
        The exit code: 0, or a signal's.

    Raises:
        FxrlError: it failed; the state is saved where that is possible.
    """
    config, questions, found, accept_changes = task
    run_dir = Path(config.run_dir)
    try_to_write(lambda: _start_folder(config, run_dir, new=found is None), str(run_dir))
    seed_everything(config.seed)
    parts = build_parts(config, questions, run_dir, reporter)
    try:
        trainer = Trainer(config, parts, run_dir)
        if found is not None:
            trainer.resume(found, accept_changes=accept_changes)
            reporter.message(f"resumed at step {trainer.done} from {found}")
        with reporter.stage("planning: memory of rollout and update"):
            for line in outlook(config, parts):
                reporter.message(line)
        reporter.begin(config.steps, trainer.done)
        with stop_on_signal() as stop:
            trainer.run(reporter, stop)
    finally:
        parts.engine.close()
    return _finish(trainer, stop, reporter)


def _start_folder(config: TrainConfig, run_dir: Path, *, new: bool) -> None:
    if new:  # a run that made no step may have been one of another seed or dtype
        for left_over in (run_dir / "model", *checkpoint.list_checkpoints(run_dir)):
            shutil.rmtree(left_over, ignore_errors=True)
    text = jsonlib.dumps(as_table(config), indent=1) + "\n"
    durable.write_bytes(run_dir / CONFIG, text.encode())


def _finish(trainer: Trainer, stop: StopRequest, reporter: Reporter) -> int:
    config, run_dir = trainer.config, trainer.run_dir
    records = read_lines(run_dir / METRICS)
    with reporter.stage("drawing the curves"):
        _draw(records, trainer, reporter)
    if stop and trainer.done < config.steps:
        reporter.message(
            f"stopped after step {trainer.done} of {config.steps}; go on with --resume "
            f"run_dir={run_dir}"
        )
        return stop.exit_code
    values = summarize(records, trainer)

    def write() -> None:
        final = str(run_dir / "final")
        with no_progress_bars():
            trainer.parts.model.save_pretrained(final)  # type: ignore[operator]
        trainer.parts.tokenizer.save_pretrained(final)
        durable.sync_tree(run_dir / "final")
        text = jsonlib.dumps(values, indent=1) + "\n"
        durable.write_bytes(run_dir / "summary.json", text.encode())

    with reporter.stage("saving: the trained model"):
        trainer.for_sure(write, "the trained model", reporter)
    reporter.summary(values)
    return 0


def _draw(records: Sequence[dict[str, Any]], trainer: Trainer, reporter: Reporter) -> None:
    """The curves; without room on the disk the run goes on without them."""
    run_dir, title = trainer.run_dir, f"{trainer.config.model.id}: {trainer.run_dir.name}"
    try:
        trainer.write_ledger()
        if records:
            plot_curves(records, run_dir / "reward_curve.png", title)
            plot_times(records, run_dir / "time_breakdown.png", title)
    except OSError as error:
        reporter.message(f"{run_dir}: {why(error)}; the curves are not drawn")


def summarize(records: Sequence[dict[str, Any]], trainer: Trainer) -> dict[str, Any]:
    """What the run came to: rewards at both ends, held-out accuracy, tokens, time, files."""
    tenth = max(1, len(records) // 10)
    values: dict[str, Any] = {
        "steps": trainer.done,
        "reward, first steps": _mean(records[:tenth], "reward"),
        "reward, last steps": _mean(records[-tenth:], "reward"),
    }
    if trainer.config.eval.size:
        values |= {
            "held-out accuracy before": trainer.initial.get("eval/initial_accuracy"),
            "held-out accuracy after": records[-1].get("eval/accuracy"),
            "most frequent answer": trainer.initial.get("eval/majority_baseline"),
        }
    return values | {
        "seconds a step, median": statistics.median(r["step_time"] for r in records),
        "tokens": trainer.num_tokens,
        "seconds": sum(record["step_time"] for record in records),
        "updates skipped": trainer.parts.updater.num_skipped,
        "model": str(trainer.run_dir / "final"),
        "curve": str(trainer.run_dir / "reward_curve.png"),
    }


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None


def _check_begun(run_dir: Path) -> None:
    """Raises where there is nothing to resume.

    Raises:
        BadConfigError: names a run whose folder has nearly that name.
    """
    if _is_run(run_dir):
        return
    others = run_dir.parent.iterdir() if run_dir.parent.is_dir() else ()
    runs = [other.name for other in others if os.access(other, os.X_OK) and _is_run(other)]
    near = did_you_mean(run_dir.name, runs) if runs else ""
    raise BadConfigError(
        f"--resume: run_dir={run_dir} holds no run{near}; leave --resume out to begin one"
    )


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or bool(checkpoint.list_checkpoints(folder))


def _where_to_start(config: TrainConfig, resume: str | None, tell: Tell) -> Path | None:
    """The checkpoint to go on from; ``None`` for the beginning.

    Raises:
        BadConfigError: a new run would overwrite another one.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    run_dir = Path(config.run_dir)
    if resume is not None:
        found = checkpoint.find_checkpoint(run_dir, resume, tell)
        if found is None:
            tell(f"{run_dir} has no checkpoint yet; beginning at step 1")
        return found
    lines = read_lines(run_dir / METRICS)
    if lines or any(place.step for place in store.list_places(run_dir)):
        raise BadConfigError(
            f"run_dir={config.run_dir} already holds a run ({len(lines)} steps); go on with "
            "--resume, or give another run_dir"
        )
    return None
