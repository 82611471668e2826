"""Files and folders that a power loss leaves whole.

NOTE [What survives a power loss]
A file's bytes are in memory until the file is synced, and its name until its folder is. What must
be whole is therefore written under another name, synced, renamed, and then its folder is synced.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems keep folders safe by themselves and know no such call.
        if not path.is_dir() or error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """``sync`` of everything in a folder, and of the folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


def rename(source: Path, target: Path) -> None:
    """Gives ``source``, which is synced, its final name; ``target`` may be a file, which goes."""
    os.replace(source, target)
    sync(target.parent)


def make_folder(folder: Path) -> None:
    """``mkdir -p`` whose names survive."""
    new = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """The whole file or the former one, whatever happens."""
    work = path.with_name(f".{path.name}.writing")
    work.unlink(missing_ok=True)
    with work.open("xb") as file:  # never through a link that somebody has put there
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(work, path)
