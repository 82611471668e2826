"""The ``fxrl`` command: parse, call the library, print. No logic lives here.

Exit codes: 0 fine, 1 the answer is no (``verify`` disagrees, nothing was optimized, the doctor
found the core broken) or something failed, 2 bad usage or bad configuration.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from fxrl.cli.parser import build_parser
from fxrl.errors import ConfigError

#: Commands that compute with values that have no memory, and print what they found.
_ON_FAKES = ("explain", "plan")
OK, NEGATIVE, USAGE = 0, 1, 2
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def _end_at_once() -> None:
    """As the last exit handler, which the first one to be registered is.

    NOTE [The prompt comes back]
    PyTorch and what it brings along leave half a million objects. To visit and free each of them
    takes the interpreter 1.5 s behind a run's last word; frozen, they go with the process. Bindings
    in C++ count theirs when all is over, and print those as leaked: nobody can act on that.
    """
    gc.freeze()
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; ``train`` takes overrides on both sides of its options."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on positionals that follow an option: fxrl train a.toml --json steps=2
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(late) < len(rest) or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    if "=" in (getattr(args, "resume", None) or ""):  # --resume steps=9: an override, no folder
        args.overrides, args.resume = [*args.overrides, args.resume], ""
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (``argv``: None for the process's own) and return its exit code; ``--help``
    and wrong usage return too (0 and 2)."""
    if argv is None:  # the process is ours, and ends with its command
        atexit.register(_end_at_once)
    try:
        args = parse(argv)
    except SystemExit as stop:  # argparse has already printed the help or the error
        return int(stop.code or 0)
    if argv is None and args.handler in _ON_FAKES:
        gc.disable()  # it frees hardly anything, and looks at all that is imported: a second of 18
    # Only now: everything under this import may load torch, and --help must not.
    from fxrl.cli import commands, show

    try:
        return int(getattr(commands, args.handler)(args))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return NEGATIVE
    except Exception as error:  # no error of fxrl's is most likely one of the user's loss or batch
        if args.traceback:
            raise
        show.error(commands.told_keys(error, args), as_json=args.json)
        return USAGE if isinstance(error, ConfigError) else NEGATIVE
    except KeyboardInterrupt:
        show.status("interrupted")
        return INTERRUPTED
