"""One run at a time in a run_dir.

The lock is the kernel's (``flock``) on ``run_dir/.lock``: a holder that dies frees it, however it
dies. What the file says is only for whoever is refused.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fxrl.errors import reason_of
from fxrl.files import make_folder
from fxrl.rl.errors import RunInUseError
from fxrl.rl.report.files import Tell, try_to_write

LOCK = ".lock"
_HELD: set[int] = set()


def _drop_in_child() -> None:
    """A forked child, such as an engine's worker, must not hold the lock of a parent that died."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_drop_in_child)


@contextlib.contextmanager
def hold(run_dir: Path, tell: Tell) -> Iterator[None]:
    """Hold the lock of ``run_dir``, which is created; if it stays empty it is removed again.
    ``tell`` hears if the file system has no locks; the run then goes on without.

    Raises ``RunInUseError`` if another process, or another run of this one, holds it,
    ``StorageError`` if the folder cannot be written.
    """
    made = not run_dir.exists()
    try_to_write(lambda: make_folder(run_dir), str(run_dir))
    path = run_dir / LOCK
    descriptor = try_to_write(lambda: _acquire(path, tell), str(path))
    _HELD.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _HELD:  # and this is no child on its way out
            with contextlib.suppress(OSError):
                if _is_at(descriptor, path):  # the folder may have been taken from under it
                    path.unlink()  # before it is free: who waits would lock a file without a name
            _HELD.discard(descriptor)
            os.close(descriptor)
            if made:
                with contextlib.suppress(OSError):
                    run_dir.rmdir()


def _acquire(path: Path, tell: Tell) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise RunInUseError(
                f"run_dir={path.parent} is in use by {holder}; wait until it has ended, stop it, "
                "or give another run_dir"
            ) from None
        except OSError as error:
            cure = "see to it that no other run has this run_dir"
            tell(f"{path}: no lock ({reason_of(error)}); {cure}")
        if _is_at(descriptor, path):
            break
        os.close(descriptor)  # its holder has just taken the name away
    start = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "start": start}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(note).encode(), 0)
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(note: bytes) -> str:
    try:
        said = json.loads(note)
        return f"process {said['pid']} on {said['host']}, which began at {said['start']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has left no note yet"
