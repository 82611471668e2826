"""One run, from its configuration to its files; ``fxrl.rl.train`` is its front door."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fxrl.models.hf import no_progress_bars
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
from fxrl.rl.report.page import PAGE, note, versions
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
            said = []
            for line in outlook(config, parts):
                said.append(line)
                reporter.message(line)
        note(run_dir, reporter.message, versions=versions(), outlook=said)
        reporter.begin(config.steps, trainer.done)
        with stop_on_signal() as stop:
            trainer.run(reporter, stop)
    finally:
        parts.engine.close()
    return _finish(trainer, stop, reporter)


def _start_folder(config: TrainConfig, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(jsonlib.dumps(as_table(config), indent=1) + "\n")


def _finish(trainer: Trainer, stop: StopRequest, reporter: Reporter) -> int:
    config, run_dir = trainer.config, trainer.run_dir
    records = read_lines(run_dir / METRICS)
    with reporter.stage(f"writing {PAGE}"):
        _write_ledger(trainer, reporter)
        trainer.write_page(reporter)
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
        (run_dir / "summary.json").write_text(jsonlib.dumps(values, indent=1) + "\n")

    with reporter.stage("saving: the trained model"):
        trainer.for_sure(write, "the trained model", reporter)
    reporter.summary(values)
    return 0


def _write_ledger(trainer: Trainer, reporter: Reporter) -> None:
    try:
        trainer.write_ledger()
    except OSError as error:
        reporter.message(f"{trainer.run_dir}: {why(error)}; the ledger is not written")


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
        "page": str(trainer.run_dir / PAGE),
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
