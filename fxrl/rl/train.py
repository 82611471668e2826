"""``fxrl train``: a configuration file in, a trained model and its curves out.

Exit codes: 0 the run is complete; 1 it failed (its state is saved where that is possible); 2 the
configuration is wrong, also where only the loaded model shows it, or the data or the checkpoint
are, before a model was loaded; 130 it was interrupted by Ctrl-C, saved, and can be resumed (143 for
SIGTERM). A second signal kills at once. A terminal that is closed, or a reader of stdout that goes
away, ends no run: it goes on and writes to ``run_dir/train.log``.

``torchrun --nproc-per-node N -m fxrl train CONFIG`` runs it on N GPUs: rank 0 talks and writes, and
an error of any rank ends them all (``fxrl.distributed``).
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import traceback as tracebacks
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from fxrl.errors import ConfigError, FxrlError
from fxrl.files import check_writable
from fxrl.rl.config.binding import read_tables
from fxrl.rl.errors import StorageError, in_words
from fxrl.rl.loop.interrupt import Terminated, told_if_slow, unwound_by_sigterm
from fxrl.rl.report.output import LOG, Output, silent
from fxrl.rl.report.progress import READING, broken, reporter_on

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, 130
ENDING = "{name}: the run ends when what it is doing lets go; a second {name} ends it at once"


def main(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    resume: str | None = None,
    accept_changes: bool = False,
    json: bool = False,
    overwrite: bool = False,
    traceback: bool = False,
) -> int:
    """Runs ``fxrl train`` and returns its exit code; ``resume``, ``accept_changes`` and
    ``overwrite`` are ``Trainer.train``'s, ``json`` writes lines of it instead of a live view."""
    output = Output(_message_event if json else str)
    rank = os.environ.get("RANK", "0")
    quiet = nullcontext() if rank == "0" else silent()
    with unwound_by_sigterm(), output.kept(), quiet:
        # Of these very streams: user code may put others into ``sys`` and forget them there.
        console, errors = Console(file=sys.stdout), Console(file=sys.stderr)
        code = BAD_CONFIG
        try:
            with (
                reporter_on(console, json=json) as reporter,
                told_if_slow(lambda name: reporter.stopping(ENDING.format(name=name))),
            ):
                _check_compile_cache()
                # PyTorch's import takes longer than a typing error.
                read_tables(Path(config_path), overrides, [])
                with reporter.stage("importing PyTorch"):
                    from fxrl.losses.own_code import importable_from
                    from fxrl.rl.config.load import load_config
                    from fxrl.rl.loop.prepare import Start
                    from fxrl.rl.trainer import Trainer
                with importable_from(Path(config_path).parent, Path.cwd()):
                    with reporter.stage(READING):
                        trainer = Trainer(config=load_config(config_path, overrides))
                    start = Start(resume, accept_changes, overwrite, (config_path, *overrides))
                    with trainer.prepared(reporter, start) as run:
                        code = FAILED
                        if rank == "0":
                            output.go_on_in(Path(trainer.config.run_dir) / LOG)
                        return run().exit_code
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if str(getattr(error, "teller", 0)) == rank != "0":  # those before it are gone
                console, errors = Console(file=sys.__stdout__), Console(file=sys.__stderr__)
            read = json and not getattr(console.file, "lost", False)
            _tell_error(error, console if read else errors, json=read, traceback=traceback)
            if isinstance(error, KeyboardInterrupt):
                return error.exit_code if isinstance(error, Terminated) else INTERRUPTED
            if isinstance(error, ConfigError):
                return BAD_CONFIG
            told = isinstance(error, FxrlError | ImportError)
            return code if told and not isinstance(error, StorageError) else FAILED


def _check_compile_cache() -> None:
    """Refuses a folder that cannot be written, before PyTorch is imported, which makes it."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if (folder := os.environ.get(name)) is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        check_writable(Path(folder))
    except OSError as error:
        raise ConfigError(
            f"{name}={folder}: compiled code cannot be kept there: {error.strerror}; give another "
            "folder, or unset it"
        ) from error


def _message_event(text: str) -> str:
    return jsonlib.dumps({"event": "message", "text": text})


def _tell_error(error: BaseException, console: Console, *, json: bool, traceback: bool) -> None:
    text = in_words(error)
    trace = "".join(tracebacks.format_exception(error)) if traceback else ""
    if json:
        event = {"event": "error", "kind": type(error).__name__, "text": text}
        event |= {"traceback": trace} if traceback else {}
        console.out(jsonlib.dumps(event), highlight=False)
    else:
        text = f"fxrl train: {text}"
        shown = trace + (broken(text, console.width) if console.is_terminal else text)
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
