"""Files written as a whole, for good, and opened without following links.

A run's folder may be a stranger's, with links in the place of files: what is written "into the
run's folder" would land wherever they point. So neither a file nor a folder below the one that the
user named may be a link; that folder itself may be.

NOTE [What survives a power loss]
A file's bytes are in memory until the file is synced, and its name until its folder is. What must
be whole is therefore written under another name, synced, renamed, and then its folder is synced.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from fxrl.errors import ForeignFileError

_FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "a+b": os.O_RDWR | os.O_APPEND | os.O_CREAT,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def refuse_links(path: Path, below: Path | None = None) -> Path:
    """``path``, unless it or a folder up to ``below`` (by default its parent) is a link."""
    below = path.parent if below is None else below
    for part in (path, *path.parents):
        if part == below:
            break
        if part.is_symlink():
            raise ForeignFileError(
                f"{part} is a link to {os.readlink(part)}: fxrl neither reads nor writes through "
                f"links below {below}; put the real file or folder there, or remove the link"
            )
    return path


def opened(path: Path, mode: Literal["rb", "ab", "a+b", "xb"], *, buffering: int = -1) -> IO[bytes]:
    """``open`` for plain files: no links, pipes or devices. ``mode`` reads, appends (creating the
    file, and with ``+`` reading as well) or creates. Raises ``ForeignFileError`` if it is no plain
    file or is reached through a link, and ``OSError`` as ``open`` does."""
    refuse_links(path)
    # Without O_NONBLOCK a pipe without a writer is waited for.
    flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    stream = os.fdopen(os.open(path, flags, 0o666), mode, buffering)
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise ForeignFileError(f"{path} is no plain file; move it away")
    return stream


def check_writable(folder: Path) -> None:
    """Raises ``OSError`` if no file can be made in a folder."""
    tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def replacing(path: Path, *, work: str = "writing") -> Iterator[IO[bytes]]:
    """A new file that replaces ``path`` once it is complete and on disk. Until then its name ends
    in ``work``; two that may write at once need different ones.

    Raises ``ForeignFileError`` if ``path`` is reached through a link, ``OSError`` if it could not
    be written; ``path`` is then unchanged.
    """
    refuse_links(path)
    new = path.with_name(f".{path.name}.{work}")
    new.unlink(missing_ok=True)
    try:
        with opened(new, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        rename(new, path)
    except BaseException:
        new.unlink(missing_ok=True)  # it takes the space that may be short
        raise


def write_bytes(path: Path, content: bytes, *, work: str = "writing") -> None:
    """``content`` in the place of ``path``, as ``replacing`` does it."""
    with replacing(path, work=work) as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """UTF-8, in the place of ``path``; raises as ``replacing`` does."""
    write_bytes(path, text.encode())


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new, empty folder that replaces ``path`` once all in it is on disk. Raises
    ``ForeignFileError`` if ``path`` is reached through a link, ``OSError`` if it cannot be written;
    ``path`` is then unchanged."""
    refuse_links(path)
    work, former = (path.with_name(f".{path.name}.{what}") for what in ("writing", "former"))
    remove(work)
    work.mkdir()
    try:
        yield work
        sync_tree(work)
        if path.exists():
            remove(former)
            os.replace(path, former)
        rename(work, path)
    except BaseException:
        remove(work)
        raise
    remove(former)


_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk. Raises ``OSError`` if the disk
    refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def remove(path: Path) -> None:
    """Remove a file, a folder with all in it, or a link (not its target), if there is one. Raises
    ``OSError`` if it is still there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_NO_MATTER_OF_SPACE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ELOOP),
    *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG),
}


def may_lack_space(error: BaseException) -> bool:
    """Whether more space could be what a failed write needs."""
    foreign = isinstance(error, ForeignFileError)
    return not foreign and getattr(error, "errno", None) not in _NO_MATTER_OF_SPACE
