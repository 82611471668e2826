"""One run, from its configuration to its files; ``fxrl.rl.train`` is its front door."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fxrl.rl.config.dtype import settle
from fxrl.rl.config.load import as_table, load_config
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.errors import BadConfigError
from fxrl.rl.loop import checkpoint
from fxrl.rl.loop.build import Questions, build_parts, pick_device, read_questions, seed_everything
from fxrl.rl.loop.interrupt import StopRequest, stop_on_signal
from fxrl.rl.loop.outlook import outlook
from fxrl.rl.loop.trainer import Trainer
from fxrl.rl.report.files import METRICS, read_lines, try_to_write, why
from fxrl.rl.report.plots import plot_curves, plot_times
from fxrl.rl.report.progress import Reporter


class Task(NamedTuple):
    """Attributes: config: complete. questions: of the run. found: the checkpoint to go on from."""

    config: TrainConfig
    questions: Questions
    found: Path | None


def prepare(
    config_path: str, overrides: Sequence[str], resume: str | None, reporter: Reporter
) -> Task:
    """Reads configuration, checkpoint and data; loads no model.

    Raises:
        FxrlError: something in them is wrong.
    """
    config = load_config(config_path, overrides)
    found = _where_to_start(config, resume)
    saved = None if found is None else checkpoint.read_trainer(found)["config"]
    model = settle(
        config.model,
        pick_device(config.model.device),
        None if saved is None else saved["model"],
        reporter.message,
    )
    config = dataclasses.replace(config, model=model)
    if found is not None and saved is not None:
        checkpoint.check_same_run(found, saved, as_table(config))
    return Task(config, read_questions(config), found)


def run(task: Task, reporter: Reporter) -> int:
    """Trains, and writes everything into the run's folder.

    Returns:
        The exit code: 0, or a signal's.

    Raises:
        FxrlError: it failed; the state is saved where that is possible.
    """
    config, questions, found = task
    run_dir = Path(config.run_dir)
    try_to_write(lambda: _start_folder(config, run_dir), str(run_dir))
    seed_everything(config.seed)
    parts = build_parts(config, questions, run_dir, reporter)
    try:
        trainer = Trainer(config, parts, run_dir)
        if found is not None:
            trainer.resume(found)
            reporter.message(f"resumed at step {trainer.done} from {found}")
        with reporter.stage("planning: memory of rollout and update"):
            for line in outlook(config, parts):
                reporter.message(line)
        reporter.begin(config.steps, trainer.done)
        with stop_on_signal(lambda name: reporter.message(_stopping(name))) as stop:
            trainer.run(reporter, stop)
    finally:
        parts.engine.close()
    try:
        return _finish(trainer, stop, reporter)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        error.add_note(
            f"what step {trainer.done} reached is saved; go on with --resume run_dir={run_dir}"
        )
        raise


def _stopping(name: str) -> str:
    return (
        f"{name}: the run stops after this step and saves its state; a second {name} ends it at "
        "once, and what follows the last checkpoint is lost"
    )


def _start_folder(config: TrainConfig, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(jsonlib.dumps(as_table(config), indent=1) + "\n")


def _finish(trainer: Trainer, stop: StopRequest, reporter: Reporter) -> int:
    config, run_dir = trainer.config, trainer.run_dir
    records = [
        {name: value for name, value in line.items() if isinstance(value, int | float)}
        for line in read_lines(run_dir / METRICS)
    ]
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
        trainer.parts.model.save_pretrained(final)  # type: ignore[operator]
        trainer.parts.tokenizer.save_pretrained(final)
        (run_dir / "summary.json").write_text(jsonlib.dumps(values, indent=1) + "\n")

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
    # Pictures of whatever metrics.jsonl holds: none is worth the trained model, which comes after.
    except Exception as error:
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
            "held-out accuracy after": (records or [{}])[-1].get("eval/accuracy"),
            "most frequent answer": trainer.initial.get("eval/majority_baseline"),
        }
    times = [record["step_time"] for record in records if "step_time" in record]
    return values | {
        "seconds a step, median": statistics.median(times) if times else None,
        "tokens": trainer.num_tokens,
        "seconds": sum(times),
        "updates skipped": trainer.parts.updater.num_skipped,
        "model": str(trainer.run_dir / "final"),
        "curve": str(trainer.run_dir / "reward_curve.png"),
    }


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None


def _where_to_start(config: TrainConfig, resume: str | None) -> Path | None:
    """The checkpoint to go on from; ``None`` for the beginning.

    Raises:
        BadConfigError: a new run would overwrite another one.
    """
    run_dir = Path(config.run_dir)
    if resume is not None:
        return checkpoint.find_checkpoint(run_dir, resume)
    lines = read_lines(run_dir / METRICS)
    if lines or checkpoint.list_checkpoints(run_dir):
        raise BadConfigError(
            f"run_dir={config.run_dir} already holds a run ({len(lines)} steps); go on with "
            "--resume, or give another run_dir"
        )
    return None
