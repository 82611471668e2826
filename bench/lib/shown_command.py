"""A result file's command as a reader would type it: without the measuring machine's places.

A file records the words that ran, with paths and time limits of a machine that is gone. What is
shown leaves out where results went and how long the run might take (``--out``, ``--append``,
limits), and overrides ``KEY=/a/path``, which name a copy of what the file already names; of other
absolute paths the last part stays. What a shell would take for its own is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

_ALONE = frozenset({"--append"})
_WITH_VALUE = frozenset({"--out", "--run-dir", "--time-limit", "--row-limit"})
_LOCAL_COPY = re.compile(r"[\w.]+=/")


def shown_commands(command: str) -> list[str]:
    """The commands that made a file, once each, in order."""
    parts = re.split(r"; (?=python -m )", command)
    return list(dict.fromkeys(" ".join(map(shlex.quote, _kept(part))) for part in parts))


def _kept(command: str) -> Iterator[str]:
    words = iter(_whole_values(shlex.split(command)))
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word not in _ALONE and not _LOCAL_COPY.match(word):
            yield word.rpartition("/")[2] if word.startswith("/") else word


def _whole_values(words: Iterable[str]) -> list[str]:
    """Older files hold values unquoted: of an option's words with a semicolon one value is made."""
    made: list[str] = []
    values: list[str] = []

    def flush() -> None:
        made.extend([" ".join(values)] if any(";" in v for v in values) else values)
        values.clear()

    for word in words:
        if word.startswith("--"):
            flush()
            made.append(word)
        else:
            values.append(word)
    flush()
    return made
