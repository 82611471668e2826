"""A measurement in a process of its own: ``tell`` there, ``measured`` here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MARK = "MEASURED "


def tell(table: Mapping[str, Any]) -> None:
    """Says what was measured; in one write, so that lines of several processes do not mix."""
    print(f"{_MARK}{json.dumps(table)}\n", end="", flush=True)


def measured(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    each: Callable[[dict[str, Any]], None] = lambda table: None,
) -> dict[str, Any]:
    """What a Python with these arguments tells; its other words go to stderr as they come.

    Args:
        environment: of the child; this process's own by default.
        limit_s: seconds after which it is ended.
        each: is given every table as soon as it is told.

    Returns:
        The last table that it told, or its exit code and last words under ``"error"``.
    """
    print(f"running {' '.join(words)}", file=sys.stderr, flush=True)
    unbuffered = {**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    timer = threading.Timer(limit_s or 0, process.kill)
    if limit_s is not None:
        timer.start()
    found: dict[str, Any] | None = None
    last = "no output"
    with process:
        for line in process.stdout or ():
            if line.startswith(_MARK):
                found = json.loads(line[len(_MARK) :])
                each(found)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()
                last = line.strip() or last
    timer.cancel()
    if process.returncode or found is None:
        return {"error": f"exit code {process.returncode}: {last}"[:300]}
    return found
