"""Checkpoint folders: complete or absent, checked byte by byte, never overwritten.

``run_dir/checkpoints/step-00000012`` and ``step-00000006-branch-2`` hold any files, and
``manifest.json``, which says their sizes and SHA-256 digests, and which checkpoint came before.

NOTE [Branches]
Training that goes on at ``run_dir``'s last checkpoint goes on with its branch. Training that goes
on anywhere else begins a branch, with the next free number, by saving what it has resumed. So the
last checkpoint, that of the highest step of the highest branch, is always of the branch that was
written last; a checkpoint is only ever deleted by later ones of its own branch; and whoever goes
back is back for good, even if the next thing that happens is a power failure.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fxrl.errors import reason_of
from fxrl.files import make_folder, may_lack_space, rename, sync, sync_tree, write_bytes
from fxrl.rl.errors import CheckpointError, StorageError
from fxrl.rl.report.files import COMPLETIONS, METRICS, as_line, read_lines

FOLDER, MANIFEST = "checkpoints", "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,18})(?:-branch-([2-9]|[1-9]\d{1,8}))?")
_WORK = ".writing-", ".deleting-"


class Place(NamedTuple):
    """The position of a checkpoint in a run's history; later ones are larger."""

    branch: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f"-branch-{self.branch}" if self.branch > 1 else "")

    def under(self, run_dir: Path) -> Path:
        return run_dir / FOLDER / self.name


def place_of(path: Path) -> Place | None:
    """What a folder's name says; ``None`` for other names."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else Place(int(found[2] or 1), int(found[1]))


def list_places(run_dir: Path) -> list[Place]:
    """Places of the complete checkpoints, the last one at the end."""
    folder = run_dir / FOLDER
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(place for path in names if (place := place_of(path)) is not None)


def next_branch(run_dir: Path) -> int:
    """The first number above those of the branches of ``run_dir``."""
    return 1 + max((place.branch for place in list_places(run_dir)), default=0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``."""

    step: int
    branch: int
    # The checkpoint that training went on from: its name, or its path if it is of another run;
    # ``None`` where it began.
    parent: str | None
    # SHA-256 digest (hexadecimal) and size [bytes] of every other file.
    files: dict[str, tuple[str, int]]

    def render(self) -> str:
        """The only text with this content; it ends with its own digest."""
        values: dict[str, Any] = {"format": _FORMAT} | asdict(self)
        values["files"] = {
            name: {"sha256": digest, "size": size}
            for name, (digest, size) in sorted(self.files.items())
        }
        digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
        return json.dumps(values | {"sha256": digest}, indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest, as it was written."""
    try:
        with _open(path, MANIFEST) as file:
            text = file.read().decode()
        values = json.loads(text)
        files = {name: (f["sha256"], f["size"]) for name, f in values["files"].items()}
        found = Manifest(values["step"], values["branch"], values["parent"], files)
        sizes = [size for _, size in files.values()]
        sound = all(type(n) is int and n >= 0 for n in (found.step, found.branch, *sizes))
        sound &= found.parent is None or type(found.parent) is str
        if not (sound and found.render() == text):
            raise ValueError("it is not as it was written")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {MANIFEST}, so nothing says whether it is whole: the file is lost, or "
            "an older fxrl wrote the checkpoint and has to finish its run"
        ) from error
    # Whatever its bytes are, they are no manifest.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST}: {error}") from error
    return found


def verify(path: Path) -> Manifest:
    """Reads every byte of a checkpoint, and refuses files that are missing, damaged or strange."""
    manifest = read_manifest(path)
    problems = [
        problem
        for name, recorded in manifest.files.items()
        if (problem := _problem(path, name, recorded))
    ]
    problems += [
        f"{name} is none of its files; move it elsewhere"
        for name in sorted(_names(path) - manifest.files.keys() - {MANIFEST})
        if not name.startswith(".")
    ]
    place = Place(manifest.branch, manifest.step)
    if place_of(path) not in (None, place):
        problems.append(f"it was {place.name}, and the folder has been renamed")
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    return manifest


def _problem(path: Path, name: str, recorded: tuple[str, int]) -> str | None:
    try:
        found = _record(path, name)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {reason_of(error)}"
    if found[1] != recorded[1]:
        return f"{name} has {found[1]} bytes instead of {recorded[1]}"
    return None if found == recorded else f"{name} has other bytes than those written"


def _names(path: Path) -> set[str]:
    found = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    return {file.relative_to(path).as_posix() for file in found}


def _record(path: Path, name: str) -> tuple[str, int]:
    with _open(path, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size


def _open(path: Path, name: str) -> io.BufferedReader:
    """A file of a checkpoint, for reading; neither its name nor a link leads out of the folder."""
    if (path / name).resolve() != path.resolve() / name:
        raise OSError(errno.ELOOP, "it lies outside of the checkpoint")
    if (path / name).exists() and not (path / name).is_file():  # to open a pipe is to wait for ever
        raise OSError(errno.EINVAL, "it is no file")
    return (path / name).open("rb")


def newest_sound(
    run_dir: Path, passed_over: Callable[[str], None] = lambda text: None
) -> Path | None:
    """The last checkpoint that is sound."""
    for place in reversed(list_places(run_dir)):
        try:
            verify(place.under(run_dir))
        except CheckpointError as error:
            passed_over(str(error))
        else:
            return place.under(run_dir)
    return None


def write(
    run_dir: Path, place: Place, parent: str | None, fill: Callable[[Path], None], keep: int
) -> Path:
    """Write a checkpoint durably, then delete all but the newest ``keep`` of its branch. Raises
    ``StorageError`` if it cannot be written; older checkpoints are then untouched.

    A step of a branch is written once: equal weights stay as they are, others begin a branch.
    """
    folder = run_dir / FOLDER
    work = folder / f"{_WORK[0]}{place.name}"
    try:
        make_folder(folder)
        _clean(folder)
        work.mkdir()
        fill(work)
        files = {name: _record(work, name) for name in _names(work)}
        if (there := place.under(run_dir)).exists():
            if _same_weights(there, files):
                _clean(folder)
                return there
            place = Place(next_branch(run_dir), place.step)
        manifest = Manifest(place.step, place.branch, parent, files)
        (work / MANIFEST).write_text(manifest.render())
        sync_tree(work)
        for lines in (METRICS, COMPLETIONS):  # up to here they belong to it
            if (run_dir / lines).is_file():
                sync(run_dir / lines)
        sync(run_dir)
        rename(work, place.under(run_dir))
    # A full disk is an OSError, a RuntimeError of torch.save or a SafetensorError.
    except Exception as error:
        shutil.rmtree(work, ignore_errors=True)  # it takes the space that is short
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        notes += "; free some space" if may_lack_space(error) else ""
        raise StorageError(
            f"the checkpoint of step {place.step} could not be written to {folder}: "
            f"{reason_of(error)}{notes}; older checkpoints are as they were"
        ) from error
    prune(run_dir, place.branch, keep)
    return place.under(run_dir)


def prune(run_dir: Path, branch: int, keep: int) -> None:
    """Deletes all checkpoints of a branch but the newest ``keep``, and what a write or a deletion
    that was cut off has left; what cannot be deleted goes the next time."""
    folder = run_dir / FOLDER
    of_branch = [place for place in list_places(run_dir) if place.branch == branch]
    with contextlib.suppress(OSError):
        for old in of_branch[:-keep]:
            # A power loss while it is deleted must not leave half of it under its name.
            os.replace(old.under(run_dir), folder / f"{_WORK[1]}{old.name}")
        _clean(folder)


def _same_weights(path: Path, files: dict[str, tuple[str, int]]) -> bool:
    try:
        there = verify(path).files
    except CheckpointError:
        return False
    return all(there.get(name) == files[name] for name in files if name.endswith(".safetensors"))


def _clean(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith(_WORK):
            shutil.rmtree(path, ignore_errors=True)


def set_lines_aside(run_dir: Path) -> None:
    """Copies ``metrics.jsonl`` and ``completions.jsonl`` to those of the last branch by name."""
    branch = next_branch(run_dir) - 1
    for name in (METRICS, COMPLETIONS):
        if (run_dir / name).is_file():
            write_bytes(run_dir / _of_branch(name, branch), (run_dir / name).read_bytes())


def take_lines_over(run_dir: Path, checkpoint: Path) -> None:
    """If a checkpoint begins a branch, restore the lines that led to its parent; none if that
    belongs to another run."""
    manifest = read_manifest(checkpoint)
    if manifest.parent is None:
        return
    parent = None if "/" in manifest.parent else place_of(Path(manifest.parent))
    if parent is not None and parent.branch == manifest.branch:
        return
    for name in (METRICS, COMPLETIONS):
        lines = [] if parent is None else read_lines(run_dir / _of_branch(name, parent.branch))
        content = b"".join(as_line(line) for line in lines if line["step"] <= manifest.step)
        write_bytes(run_dir / name, content)


def _of_branch(name: str, branch: int) -> str:
    return name.replace(".", f"-branch-{branch}.", 1)
