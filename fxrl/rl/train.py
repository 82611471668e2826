"""``fxrl train``: a configuration file in, a trained model and its curves out.

Exit codes: 0 the run is complete; 1 it failed (its state is saved where that is possible); 2 the
configuration or the data is wrong, nothing was loaded; 130 it was interrupted by Ctrl-C, saved, and
can be resumed (143 for SIGTERM). A second signal kills at once.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fxrl.errors import FxrlError
from fxrl.rl.report.progress import reporter_on

FAILED, BAD_CONFIG = 1, 2


def main(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    resume: str | None = None,
    json: bool = False,
) -> int:
    """Runs ``fxrl train``.

    Args:
        config_path: the TOML file.
        overrides: ``key=value`` texts.
        resume: ``""``: go on at the newest checkpoint of ``run_dir`` (from the start if there is
            none); a path: go on at that checkpoint; ``None``: a new run.
        json: JSON lines on stdout instead of a live view.

    Returns:
        The exit code, see the module's docstring.
    """
    console, errors = Console(), Console(stderr=True)
    code = BAD_CONFIG
    try:
        with reporter_on(console, json=json) as reporter:
            with reporter.stage("importing PyTorch"):
                from fxrl.losses.own_code import importable_from
                from fxrl.rl.loop import run
            with importable_from(Path(config_path).parent, Path.cwd()):
                with reporter.stage("reading the configuration and the data"):
                    task = run.prepare(config_path, overrides, resume, reporter)
                code = FAILED
                return run.run(task, reporter)
    except (FxrlError, ImportError) as error:
        if code == FAILED and not isinstance(error, FxrlError):
            raise
        _tell_error(error, console if json else errors, json)
        return code


def _tell_error(error: BaseException, console: Console, json: bool) -> None:
    notes = getattr(error, "__notes__", [])
    text = "\n".join([str(error), *notes])
    if json:
        event = {"event": "error", "kind": type(error).__name__, "text": text}
        console.out(jsonlib.dumps(event), highlight=False)
    else:
        console.print(f"fxrl train: {text}", markup=False, highlight=False, soft_wrap=True)
