"""A run before it has a model: its folder is held, its checkpoint, tokenizer and data are read."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fxrl.distributed import Ranks, joined
from fxrl.engines import check_engine
from fxrl.errors import did_you_mean
from fxrl.files import refuse_links
from fxrl.models import load_tokenizer
from fxrl.rl.config.load import as_table, differences
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.data.examples import Examples
from fxrl.rl.errors import BadConfigError, in_words
from fxrl.rl.loop import checkpoint, store
from fxrl.rl.loop.data import Questions, read_data
from fxrl.rl.loop.dtype import settle
from fxrl.rl.loop.fingerprint import check_unchanged
from fxrl.rl.loop.lock import hold
from fxrl.rl.loop.models import pick_device
from fxrl.rl.report.files import METRICS, Tell, read_lines
from fxrl.rl.report.hub import HubPush
from fxrl.rl.report.progress import Reporter
from fxrl.rl.report.trackers import trackers

CONFIG = "config.json"


class Start(NamedTuple):
    """Where a run begins; ``Trainer.train`` says what each is."""

    resume: str | None = None
    accept_changes: bool = False
    overwrite: bool = False
    words: tuple[str, ...] = ()  # of the command line: the file and what replaces its entries

    @property
    def again(self) -> str:
        """What goes on with the run when it has stopped."""
        if not self.words:
            return "go on with train(resume='')"
        command = "torchrun ... -m fxrl" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "fxrl"
        return f"go on with: {command} train {' '.join(map(_quoted, self.words))} --resume"


def _quoted(word: str) -> str:
    """As a shell takes it; texts of TOML in double quotes, which leave theirs readable."""
    plain = "'" in word and not set(word) & set('"$`\\!')
    return f'"{word}"' if plain else shlex.quote(word)


class Task(NamedTuple):
    """A run that is checked as far as that goes without its model."""

    config: TrainConfig
    data: Questions | Examples
    found: Path | None  # the checkpoint to go on from
    start: Start  # where it was told to begin; ``found`` is what that came to
    callbacks: tuple[object, ...]  # the caller's between the trackers and the push to the hub
    ranks: Ranks


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
