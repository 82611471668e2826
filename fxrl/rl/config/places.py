"""Where the files and folders lie that a run's file names.

A relative name of the file is looked for beside it and in the working folder, so a file travels
with its data, and runs that are started where the data lie go on as before. Which of two is meant
is nobody's guess: the file has to say. What is typed as an override is meant as it stands there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fxrl.rl.config.binding import Text, merge_override

_FILES: Mapping[str, Callable[[str], bool]] = {
    "data.path": os.path.isfile,
    "eval.path": os.path.isfile,
    "data.dataset": os.path.isdir,  # or names of the hub, as a model's are
    "eval.dataset": os.path.isdir,
    "model.id": os.path.exists,
    "teacher.id": os.path.exists,
}
"""The keys, and what is found there."""


def settle_places(table: dict[str, Any], home: Path) -> Iterator[str]:
    """Puts the whole path where a name is found beside the run's file (folder ``home``) alone; a
    line for each that is found in both places."""
    for key, there in _FILES.items():
        outer, _, name = key.partition(".")
        given = table.get(outer)
        value = given.get(name) if isinstance(given, Mapping) else None
        typed = isinstance(value, Text)
        text = value.value if isinstance(value, Text) else value
        if not isinstance(text, str) or not text:
            continue
        here = os.path.expanduser(text)
        beside = os.path.join(home, here)
        if not there(beside):
            continue
        known = there(here)
        if known and not typed and not os.path.samefile(here, beside):
            two = f"{os.path.realpath(beside)} and {os.path.realpath(here)}"
            yield f"{key}={text!r} is {two}; give the whole path of one"
        elif not known or here != text:  # or it began with ~
            place = os.path.realpath(beside)
            merge_override(table, (outer, name), Text(place, place))
