"""One run, from its configuration to its files; ``fxrl.rl.Trainer`` is its front door."""

from __future__ import annotations

import dataclasses
import itertools
import json as jsonlib
import math
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from fxrl.distributed import Ranks, joined
from fxrl.engines import check_engine
from fxrl.errors import FxrlError, did_you_mean
from fxrl.files import refuse_links, remove, rename, replacing_folder, write_text
from fxrl.models import load_tokenizer
from fxrl.models.hf import save_pretrained
from fxrl.rl.config.load import as_table, differences
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.data.examples import Examples
from fxrl.rl.errors import BadConfigError, in_words
from fxrl.rl.loop import checkpoint, store
from fxrl.rl.loop.build import build_parts, seed_everything
from fxrl.rl.loop.data import Questions, read_data
from fxrl.rl.loop.dtype import settle
from fxrl.rl.loop.fingerprint import check_unchanged, of_tensors
from fxrl.rl.loop.interrupt import StopRequest, stop_on_signal
from fxrl.rl.loop.lock import LOCK, hold
from fxrl.rl.loop.models import pick_device
from fxrl.rl.loop.outlook import outlook
from fxrl.rl.loop.precomputed import precompute
from fxrl.rl.loop.trainer import TrainingLoop
from fxrl.rl.report.files import METRICS, Tell, read_lines, try_to_write
from fxrl.rl.report.hub import HubPush
from fxrl.rl.report.page import PAGE, note, versions
from fxrl.rl.report.progress import Reporter, warned
from fxrl.rl.report.trackers import trackers

CONFIG = "config.json"
_BUILDING = "putting the run together"


class Start(NamedTuple):
    """Where a run begins; ``Trainer.train`` says what each is."""

    resume: str | None = None
    accept_changes: bool = False
    overwrite: bool = False


class Task(NamedTuple):
    """A run that is checked as far as that goes without its model."""

    config: TrainConfig
    data: Questions | Examples
    found: Path | None  # the checkpoint to go on from
    start: Start  # where it was told to begin; ``found`` is what that came to
    callbacks: tuple[object, ...]  # the caller's between the trackers and the push to the hub
    ranks: Ranks


class Outcome(NamedTuple):
    """What a run came to."""

    exit_code: int  # 0, or a signal's that stopped it
    summary: dict[str, Any]  # as in ``summary.json``; of a run that was stopped, up to there
    model: nn.Module  # trained
    tokenizer: Any  # its own


@contextmanager
def prepare(
    config: TrainConfig,
    reporter: Reporter,
    start: Start,
    *,
    callbacks: tuple[object, ...] = (),
    tokenizer: Any = None,
) -> Iterator[Task]:
    """Read checkpoint, tokenizer and data, and hold ``run_dir`` while open; loads no model. Raises
    ``FxrlError`` if something is wrong with them, or another run holds ``run_dir``."""
    tell = reporter.message
    config = config.settled()
    if start.accept_changes and start.resume is None:
        raise BadConfigError("--accept-changes says nothing without --resume")
    check_engine(config.engine)
    device = pick_device(config.model.device)
    if start.overwrite:
        _check_spared(config)
    with joined(in_words) as ranks:
        _check_ranks(config, ranks)
        with _written_by(ranks, config, callbacks, start.resume, tell) as (config, called):
            found = None
            if ranks.primary and not start.overwrite:
                found = _where_to_start(config, start.resume, tell)
            found = ranks.broadcast(found)
            saved = None if found is None else checkpoint.read_trainer(found)
            begun = None if saved is None else saved["config"]["model"]
            model = settle(config.model, device, begun, tell)
            config = dataclasses.replace(config, model=model)
            for warning in config.warnings():
                tell(warning)
            if tokenizer is None:
                tokenizer = _tokenizer(model.name, reporter)
            with reporter.stage("reading the data"):
                data = read_data(config, tokenizer, tell)
            if config.epochs is not None:
                config = _by_epochs(config, len(data.split.train), tell)
            if found is not None and saved is not None:
                checkpoint.check_same_run(found, saved["config"], as_table(config))
                former, present = saved["fingerprints"], data.fingerprints
                check_unchanged(found, former, present, accept=start.accept_changes)
            ranks.check_same("data, rewards and loss", dict(data.fingerprints))
            yield Task(config, data, found, start, called, ranks)


@contextmanager
def _written_by(
    ranks: Ranks, config: TrainConfig, callbacks: tuple[object, ...], resume: str | None, tell: Tell
) -> Iterator[tuple[TrainConfig, tuple[object, ...]]]:
    """``config`` with the folder that this rank has while the block lasts; what it calls.

    NOTE [What the other ranks write]
    Of several ranks the first has ``run_dir``, callbacks and trackers. The others go through the
    same loop with a folder of their own, that goes when they end, so that nothing needs to ask who
    it is but what is large: checkpoints and the trained model. They read rank 0's checkpoints, so
    ranks of several hosts need a file system that all of them see.
    """
    if not ranks.primary:
        with TemporaryDirectory(prefix="fxrl-rank-") as scratch:
            yield dataclasses.replace(config, run_dir=scratch), ()
        return
    run_dir = Path(config.run_dir)
    _check_own(run_dir)
    if resume in ("", checkpoint.SOUND):
        _check_begun(run_dir)
    called = [*trackers(config, tell), *callbacks]
    if config.push_to_hub is not None:
        called.append(HubPush(config.push_to_hub, tell))
    with hold(run_dir, tell):
        yield config, tuple(called)


def _check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Raises where ranks have other configurations, or are too few to share a sequence."""
    if changed := differences(ranks.broadcast(as_table(config)), as_table(config)):
        lines = "\n  ".join(changed)
        raise BadConfigError(f"it has another configuration than rank 0:\n  {lines}")
    if ranks.size % (sharing := config.fxrl.context_parallel):
        raise BadConfigError(
            f"fxrl.context_parallel={sharing} lets {sharing} ranks share each sequence, and "
            f"{ranks.size} run; start them by torchrun --nproc-per-node {sharing} -m fxrl "
            "train, or a multiple"
        )


def _check_spared(config: TrainConfig) -> None:
    """Raises where the folder that ``--overwrite`` moves aside holds what the run reads."""
    adapter, teacher = config.model.adapter, config.teacher
    read = {
        "model.id": config.model.id,
        "model.id's base model": None if adapter is None else adapter.base,
        "teacher.id": None if teacher is None else teacher.id,
        "data.path": config.data.path,
        "eval.path": config.eval.path,
    }
    run_dir = Path(config.run_dir).resolve()
    for key, place in read.items():
        if isinstance(place, str) and Path(place).resolve().is_relative_to(run_dir):
            raise BadConfigError(
                f"--overwrite moves run_dir={config.run_dir} aside, and {key}={place!r} lies in "
                "it; give another run_dir"
            )


def _tokenizer(model: str, reporter: Reporter) -> Any:
    with reporter.stage(f"loading the tokenizer: {model}") as say:
        found = load_tokenizer(model, say)
    if found is None:
        raise BadConfigError(f"model.id={model!r} has no tokenizer; give a folder with one")
    return found


def _by_epochs(config: TrainConfig, num_questions: int, tell: Tell) -> TrainConfig:
    """The configuration with the steps that ``epochs`` amounts to."""
    assert config.epochs is not None
    steps = math.ceil(config.epochs * num_questions / config.prompts_per_step)
    tell(
        f"epochs={config.epochs:g}: {steps} steps of {config.prompts_per_step} prompts over "
        f"{num_questions} questions"
    )
    return dataclasses.replace(config, steps=steps)


def run(task: Task, reporter: Reporter) -> Outcome:
    """Train, and write everything into the run's folder. Raises ``FxrlError`` if that fails; the
    state is saved if possible."""
    config, run_dir = task.config, Path(task.config.run_dir)
    if task.start.overwrite:
        _move_aside(run_dir, reporter.message)
    try_to_write(lambda: _start_folder(config, run_dir, new=task.found is None), str(run_dir))
    seed_everything(config.seed)
    with reporter.stage(_BUILDING):
        parts = build_parts(config, task.data, run_dir, reporter, task.callbacks, task.ranks)
        loop = TrainingLoop(config, parts, run_dir)
    try:
        with warned(reporter.message):
            outcome = _trained(loop, task, reporter)
    except BaseException as error:
        try:
            parts.events("on_train_end", loop.now(), error=error, final=None)
        except FxrlError as another:
            error.add_note(str(another))
        raise
    final = run_dir / "final" if outcome.exit_code == 0 else None
    parts.events("on_train_end", loop.now(), error=None, final=final)
    return outcome


def _trained(loop: TrainingLoop, task: Task, reporter: Reporter) -> Outcome:
    config, parts = loop.config, loop.parts
    try:
        with reporter.stage(_BUILDING):
            if config.precompute_ref_log_probs:
                precompute(config, parts, loop.run_dir, reporter)
            if task.found is not None:
                loop.resume(task.found, accept_changes=task.start.accept_changes)
                reporter.message(f"resumed at step {loop.done} from {task.found}")
            weights = [(n, p) for n, p in parts.model.named_parameters() if p.requires_grad]
            parts.ranks.check_same("the model", [parts.fingerprints, of_tensors(weights)])
        with reporter.stage("planning: memory of rollout and update"):
            said = []
            for line in outlook(config, parts):
                said.append(line)
                reporter.message(line)
        note(loop.run_dir, reporter.message, versions=versions(), outlook=said)
        reporter.begin(config.steps, loop.done)
        with stop_on_signal(lambda name: reporter.stopping(_stopping(name))) as stop:
            loop.run(reporter, stop)
    finally:
        parts.engine.close()
    try:
        return _finish(loop, stop, reporter)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        error.add_note(
            f"what step {loop.done} reached is saved; go on with --resume run_dir={loop.run_dir}"
        )
        raise


def _stopping(name: str) -> str:
    return (
        f"{name}: the run stops after this step and saves its state; a second {name} ends it at "
        "once, and what follows the last checkpoint is lost"
    )


def _start_folder(config: TrainConfig, run_dir: Path, *, new: bool) -> None:
    if new:  # a run that made no step may have been one of another seed or dtype
        for left_over in (run_dir / "model", *checkpoint.list_checkpoints(run_dir)):
            shutil.rmtree(left_over, ignore_errors=True)
    write_text(run_dir / CONFIG, jsonlib.dumps(as_table(config), indent=1) + "\n")


def _finish(loop: TrainingLoop, stop: StopRequest, reporter: Reporter) -> Outcome:
    config, run_dir = loop.config, loop.run_dir
    records = [
        {name: value for name, value in line.items() if isinstance(value, int | float)}
        for line in read_lines(run_dir / METRICS)
    ]
    with reporter.stage(f"writing {PAGE}"):
        loop.write_ledger(reporter)
        loop.write_page(reporter)
    values = summarize(records, loop)
    outcome = Outcome(0, values, loop.parts.model, loop.parts.tokenizer)
    asked = loop.parts.events.control.should_training_stop
    if loop.done < config.steps and asked:
        reporter.message(f"a callback ended the run after step {loop.done} of {config.steps}")
    elif loop.done < config.steps:
        reporter.message(
            f"stopped after step {loop.done} of {config.steps}; go on with --resume "
            f"run_dir={run_dir}"
        )
        return outcome._replace(exit_code=stop.exit_code)

    def write() -> None:
        with replacing_folder(run_dir / "final") as final:
            save_pretrained(loop.parts.model, final)
            loop.parts.tokenizer.save_pretrained(str(final))
        write_text(run_dir / "summary.json", jsonlib.dumps(values, indent=1) + "\n")

    if loop.parts.ranks.primary:
        with reporter.stage("saving: the trained model"):
            loop.for_sure(write, "the trained model", reporter)
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


def _check_own(run_dir: Path) -> None:
    """Refuse to write into what somebody else has put there: raises ``BadConfigError`` for a file,
    ``ForeignFileError`` for links in the folder."""
    if run_dir.is_dir():
        for entry in run_dir.iterdir():
            refuse_links(entry)
    elif run_dir.exists():
        raise BadConfigError(f"run_dir={str(run_dir)!r} is a file; name a folder, or a new one")


def _check_begun(run_dir: Path) -> None:
    """Raises where there is nothing to resume."""
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
    """The checkpoint to resume from; ``None`` is the beginning. Raises ``BadConfigError`` if a new
    run would overwrite another, ``CheckpointError`` if there is no such checkpoint or it is
    damaged."""
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
            "--resume, start anew with --overwrite, or give another run_dir"
        )
    return None
