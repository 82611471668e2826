"""One run, from what was prepared to its files; ``fxrl.rl.Trainer`` is its front door."""

from __future__ import annotations

import itertools
import json as jsonlib
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fxrl.errors import FxrlError
from fxrl.files import remove, rename, replacing_folder, write_text
from fxrl.models.hf import save_pretrained
from fxrl.rl.config.load import as_table
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.loop import checkpoint
from fxrl.rl.loop.build import build_parts, seed_everything
from fxrl.rl.loop.fingerprint import of_tensors
from fxrl.rl.loop.interrupt import StopRequest, stop_on_signal
from fxrl.rl.loop.lock import LOCK
from fxrl.rl.loop.outlook import outlook
from fxrl.rl.loop.precomputed import precompute
from fxrl.rl.loop.prepare import CONFIG, Task
from fxrl.rl.loop.trainer import TrainingLoop
from fxrl.rl.report.files import METRICS, Tell, read_lines, try_to_write
from fxrl.rl.report.page import PAGE, note, versions
from fxrl.rl.report.progress import Reporter, warned

_BUILDING = "putting the run together"
_STOPPING = (
    "{name}: the run stops after this step and saves its state; a second {name} ends it at once, "
    "and what follows the last checkpoint is lost"
)


class Outcome(NamedTuple):
    """What a run came to."""

    exit_code: int  # 0, or a signal's that stopped it
    summary: dict[str, Any]  # as in ``summary.json``; of a run that was stopped, up to there
    model: nn.Module  # trained
    tokenizer: Any  # its own


def run(task: Task, reporter: Reporter) -> Outcome:
    """Train, and write everything into the run's folder. Raises ``FxrlError`` if that fails; the
    state is saved if possible."""
    config, run_dir = task.config, Path(task.config.run_dir)
    if task.start.overwrite:
        _move_aside(run_dir, reporter.message)
    try_to_write(lambda: _start_folder(config, run_dir, new=task.found is None), str(run_dir))
    seed_everything(config.seed)
    with reporter.stage(_BUILDING):
        parts = build_parts(task, reporter)
        loop = TrainingLoop(parts, task.start.again)
    try:
        with warned(reporter.message):
            outcome = _trained(loop, task)
    except BaseException as error:
        try:
            parts.events("on_train_end", loop.now(), error=error, final=None)
        except FxrlError as another:
            error.add_note(str(another))
        raise
    final = run_dir / "final" if outcome.exit_code == 0 else None
    parts.events("on_train_end", loop.now(), error=None, final=final)
    return outcome


def _trained(loop: TrainingLoop, task: Task) -> Outcome:
    config, parts, reporter = loop.config, loop.parts, loop.parts.reporter
    try:
        with reporter.stage(_BUILDING):
            if config.precompute_ref_log_probs:
                precompute(parts)
            if task.found is not None:
                loop.resume(task.found, accept_changes=task.start.accept_changes)
                reporter.message(f"resumed at step {loop.done} from {task.found}")
            weights = [(n, p) for n, p in parts.model.named_parameters() if p.requires_grad]
            parts.ranks.check_same("the model", [parts.fingerprints, of_tensors(weights)])
        with reporter.stage("planning: memory of rollout and update"):
            said = []
            for line in outlook(parts):
                said.append(line)
                reporter.message(line)
        note(loop.run_dir, reporter.message, versions=versions(), outlook=said)
        reporter.begin(config.steps, loop.done)
        with stop_on_signal(lambda name: reporter.stopping(_STOPPING.format(name=name))) as stop:
            loop.run(stop)
    finally:
        parts.engine.close()
    try:
        return _finish(loop, stop)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        error.add_note(f"what step {loop.done} reached is saved; {loop.again}")
        raise


def _start_folder(config: TrainConfig, run_dir: Path, *, new: bool) -> None:
    if new:  # a run that made no step may have been one of another seed or dtype
        for left_over in (run_dir / "model", *checkpoint.list_checkpoints(run_dir)):
            shutil.rmtree(left_over, ignore_errors=True)
    write_text(run_dir / CONFIG, jsonlib.dumps(as_table(config), indent=1) + "\n")


def _finish(loop: TrainingLoop, stop: StopRequest) -> Outcome:
    config, run_dir, reporter = loop.config, loop.run_dir, loop.parts.reporter
    records = [
        {name: value for name, value in line.items() if isinstance(value, int | float)}
        for line in read_lines(run_dir / METRICS)
    ]
    with reporter.stage(f"writing {PAGE}"):
        loop.write_ledger()
        loop.write_page()
    values = summarize(records, loop)
    outcome = Outcome(0, values, loop.parts.model, loop.parts.tokenizer)
    asked = loop.parts.events.control.should_training_stop
    if loop.done < config.steps and asked:
        reporter.message(f"a callback ended the run after step {loop.done} of {config.steps}")
    elif loop.done < config.steps:
        reporter.show_last()  # the last word is what to do
        reporter.message(f"stopped after step {loop.done} of {config.steps}; {loop.again}")
        return outcome._replace(exit_code=stop.exit_code)

    def write() -> None:
        with replacing_folder(run_dir / "final") as final:
            save_pretrained(loop.parts.model, final)
            loop.parts.tokenizer.save_pretrained(str(final))
        write_text(run_dir / "summary.json", jsonlib.dumps(values, indent=1) + "\n")

    if loop.parts.ranks.primary:
        with reporter.stage("saving: the trained model"):
            loop.for_sure(write, "the trained model")
    reporter.summary(values)
    return outcome


def summarize(records: Sequence[dict[str, Any]], loop: TrainingLoop) -> dict[str, Any]:
    """What the run came to: its headline at both ends and held out, tokens, time, files."""
    tenth = max(1, len(records) // 10)
    trained, judged = loop.parts.source.headline
    values: dict[str, Any] = {
        "steps": loop.done,
        f"{trained}, first steps": _mean(records[:tenth], trained),
        f"{trained}, last steps": _mean(records[-tenth:], trained),
    }
    if loop.parts.data.split.held_out:
        values |= {
            f"held-out {judged} before": loop.initial.get(f"eval/initial_{judged}"),
            f"held-out {judged} after": (records or [{}])[-1].get(f"eval/{judged}"),
        }
    if (baseline := loop.initial.get("eval/majority_baseline")) is not None:
        values["most frequent answer"] = baseline
    times = [record["step_time"] for record in records if "step_time" in record]
    return values | {
        "seconds a step, median": statistics.median(times) if times else None,
        "tokens": loop.num_tokens,
        "seconds": sum(times),
        "updates skipped": loop.parts.updater.num_skipped,
        "model": str(loop.run_dir / "final"),
        "page": str(loop.run_dir / PAGE),
    }


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None


def _move_aside(run_dir: Path, tell: Tell) -> None:
    """A run that is there keeps its files, under the folder's name with a number; not the lock."""
    if not read_lines(run_dir / METRICS) and not checkpoint.list_checkpoints(run_dir):
        return
    if run_dir.is_symlink():  # the link stays
        run_dir = run_dir.resolve()
    aside = next(
        path
        for number in itertools.count(1)
        if not (path := run_dir.with_name(f"{run_dir.name}.{number}")).exists()
    )
    new = run_dir.with_name(f".{run_dir.name}.new")

    def move() -> None:
        # The new folder appears with the lock in it: nobody ever finds one that is free.
        remove(new)
        new.mkdir()
        os.link(run_dir / LOCK, new / LOCK)
        try:
            rename(run_dir, aside)
            (aside / LOCK).unlink()
            tell(f"run_dir={run_dir}: the run that it held is in {aside}")
            rename(new, run_dir)
        finally:
            remove(new)

    try_to_write(move, str(run_dir))
