"""The command line of the head benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence

import torch

from bench.lib import common
from bench.lib.head_case import MODES, parse_shapes
from bench.lib.head_inputs import Shape, parse_source
from bench.lib.head_peers import VARIANTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LARGE_GPU = 64 * 2**30  # bytes: eager's logits of most of the shapes need as much
DEFAULT_MODES = ("no_grad", "frozen", "trainable", "frozen+entropy", "frozen+softcap")


def parse(about: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ends the process with exit code 2 where they are wrong."""
    parser = build_parser(about)
    args = parser.parse_args(argv)
    if min(args.time_limit, args.row_limit) <= 0 or args.error_rows < 0:
        parser.error(
            "--time-limit and --row-limit must be positive and --error-rows not negative; got "
            f"{args.time_limit:g}, {args.row_limit:g} and {args.error_rows}"
        )
    if args.append and args.out is None:
        parser.error("--append goes on with a file: name it with --out")
    if args.shapes is None:
        args.shapes = _default_shapes(args)
    elif args.inputs.shape is not None:
        own = args.inputs.shape()
        if wrong := [str(shape) for shape in args.shapes if (shape.hidden, shape.vocab) != own]:
            parser.error(
                f"{args.inputs.name} has H,V = {own[0]},{own[1]}, not {' and '.join(wrong)}; "
                "leave --shapes out, or change only N"
            )
    return args


def _default_shapes(args: argparse.Namespace) -> list[Shape]:
    gpu = args.device == "cuda"
    if args.inputs.shape is not None:
        return [Shape(16384 if gpu else 256, *args.inputs.shape())]
    if args.inputs.name != "peaked":
        return [Shape(16384, 2048, 151936) if gpu else Shape(256, 64, 1000)]
    if gpu and torch.cuda.get_device_properties(0).total_memory < _LARGE_GPU:
        return parse_shapes("4096,1024,151936")
    return parse_shapes("issue" if gpu else "256,64,1000")


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """With ``shapes`` None where the machine and the inputs decide."""
    parser = common.parser(about)
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        help="N,H,V;N,H,V: tokens, channels, vocabulary; or 'issue', seven of real models (the "
        "default on a GPU)",
    )
    parser.add_argument(
        "--inputs",
        type=parse_source,
        default="peaked",
        help="peaked (random), or model:FOLDER, a causal LM reading text (%(default)s)",
    )
    parser.add_argument(
        "--variants",
        type=_names(VARIANTS, "variant"),
        default=tuple(VARIANTS),
        metavar="A,B",
        help=f"of {', '.join(VARIANTS)}; or all (all)",
    )
    parser.add_argument(
        "--modes",
        type=_names(MODES, "mode"),
        default=DEFAULT_MODES,
        metavar="A,B",
        help=f"of {', '.join(MODES)}; or all (all but the last)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=_positive, default=9, help="timed calls a row (9)")
    parser.add_argument("--sets", type=_positive, default=3, help="input sets, used in turn (3)")
    parser.add_argument(
        "--error-rows", type=int, default=0, help="check so many tokens instead of all"
    )
    parser.add_argument(
        "--row-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds a row may take, compiling included (60); then the row says so",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=float(10**9),
        metavar="S",
        help="seconds for all rows; what is left is named in a note and measured with --append",
    )
    parser.add_argument(
        "--append", action="store_true", help="add to the rows of --out what it lacks"
    )
    return parser


def _names(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    def parse_names(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"no {what} {', '.join(unknown)}; there are {', '.join(known)} and all"
            )
        return names

    return parse_names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
