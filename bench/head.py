"""The loss head alone: log-probs of given tokens from hidden states, fxrl beside its peers.

One row for each shape, mode and variant. A time is the median over rotated input sets, head
included; ``of_floor`` is the share of it that cuBLAS needs for the products no exact head can do
without, measured in the same run: 2NHV without gradient, 4NHV for a frozen head, 8NHV for a
trainable one that stores no [N, V] (see bench/lib/head_floor.py). ``peak_mib`` is the allocator's
peak over the inputs, so gradients count. Errors are distances to float64. A variant that cannot run
is a row with its error. Rows are written as they come; ``--append`` goes on with a file and
measures what it lacks.

    fxrl bench head --shapes issue --out head.json
    fxrl bench head --shapes "16384,4096,151936" --modes frozen --variants fxrl,trl
    fxrl bench head --inputs model:/models/smollm2 --modes frozen --variants fxrl,cce
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.lib import common, gpu_state, head_floor
from bench.lib.head_case import (
    CHECKED_VOCAB,
    MODES,
    SOFTCAP,
    Mode,
    Outcome,
    Truth,
    errors,
    parse_shapes,
    require,
    truth,
)
from bench.lib.head_inputs import Inputs, Shape, parse_source
from bench.lib.head_peers import VARIANTS, Head, Variant

COLUMNS = (
    "shape", "mode", "variant", "version", "ms", "ms_min", "ms_max", "floor_ms", "of_floor",
    "peak_mib", "logprob_error", "entropy_error", "dh_error", "dw_error",
    "first_call_s", "sm_mhz", "power_w", "temperature_c", "error",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LARGE_GPU = 64 * 2**30  # bytes: eager's logits of most of the shapes need as much
DEFAULT_MODES = ("no_grad", "frozen", "trainable", "frozen+entropy", "frozen+softcap")
_LEFT = "not measured: "


class DeviceLostError(Exception):
    """After this variant the device answers nothing any more."""


class OutOfTime(Exception):
    """The run's own time is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures.

    Returns:
        0; 1 if fxrl itself failed in a row or the device was lost; 2 for bad usage.
    """
    args = parse(__doc__, argv)
    setup = {"inputs": args.inputs.name, "dtype": args.dtype, "sets": args.sets}
    title = "Loss head beside its peers"
    if args.inputs.name != "peaked":
        title += f", inputs: {args.inputs.name}"
    try:
        results = common.Results(
            title, COLUMNS, args.out, notes(args), as_json=args.json, append=args.append
        )
        if results.extra.setdefault("setup", setup) != setup:
            raise common.ResultsError(
                f"cannot append to {args.out}: it has {results.extra['setup']}, not {setup}"
            )
    except common.ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _run(args, results)


def _run(args: argparse.Namespace, results: common.Results) -> int:
    for variant in map(VARIANTS.__getitem__, args.variants):
        if variant.version is not None:  # the package was missing when the file was written
            results.drop(variant=variant.title, version=None)
    results.notes = [note for note in results.notes if not note.startswith(_LEFT)]
    results.extra |= {"readme": README, "floors": results.extra.get("floors", {})}
    if gpu_state.available(args.device):
        results.note(f"GPU: {gpu_state.settings()}")
    deadline = time.monotonic() + args.time_limit
    lost = False
    try:
        for shape in args.shapes:
            _shape(shape, args, results, deadline)
            common.free_memory(args.device)
    except OutOfTime:
        left = sum(len(_missing(shape, args, results)) for shape in args.shapes)
        results.note(f"{_LEFT}{left} rows, as --time-limit {args.time_limit:g} was over")
        results.say(f"{left} rows are left: run again with --append")
    except DeviceLostError as error:
        results.note(str(error))
        lost = True
    results.finish()
    return int(lost or _ours_failed(results))


def _missing(
    shape: Shape, args: argparse.Namespace, results: common.Results
) -> list[tuple[Mode, Variant]]:
    """The rows of one shape that the file does not have."""
    asked = itertools.product(args.modes, args.variants)
    pairs = [(MODES[mode], VARIANTS[variant]) for mode, variant in asked]
    return [
        (mode, variant)
        for mode, variant in pairs
        if not results.has(shape=str(shape), mode=mode.name, variant=variant.title)
    ]


def _ours_failed(results: common.Results) -> bool:
    """Whether fxrl has an error that is no "cannot do this"."""
    named = [dict(zip(results.columns, row, strict=True)) for row in results.rows]
    ours = VARIANTS["fxrl"].title
    found = [row["error"] for row in named if row["variant"] == ours and row["error"]]
    return any(not error.startswith("UnsupportedError") for error in found)


def _shape(
    shape: Shape, args: argparse.Namespace, results: common.Results, deadline: float
) -> None:
    """All rows of one shape that are missing."""
    missing = _missing(shape, args, results)
    if not missing:
        return
    _check_time(deadline)
    dtype = DTYPES[args.dtype]
    results.say(f"{shape}: inputs and floor, then {len(missing)} rows")
    sets = [args.inputs.make(shape, dtype, args.device, seed) for seed in range(args.sets)]
    wanted = [mode.products for mode in dict.fromkeys(mode for mode, _ in missing)]
    floor = head_floor.measure(sets, wanted, args.device, args.repeats)
    _record_floor(shape, floor, args, results)
    common.free_memory(args.device)
    truths: dict[tuple[float, bool], Truth] = {}
    for mode, variant in missing:
        key = mode.softcap, mode.entropy_grad
        if key not in truths:
            truths[key] = truth(sets[0], mode, args.error_rows)
            if key == (0.0, False):
                results.note(_distribution(shape, truths[key]))
            common.free_memory(args.device)
        for inputs in sets:
            require(inputs, mode)
        row: dict[str, Any] = {"shape": str(shape), "mode": mode.name, "variant": variant.title}
        row |= {"version": variant.version, "floor_ms": floor.of(mode.products)}
        _fill(row, variant, mode, sets, truths[key], args, deadline)
        results.add(**row)
        try:
            common.free_memory(args.device)
        except RuntimeError as error:
            raise DeviceLostError(
                f"stopped: after {variant.title} on {shape}, {mode.name}, the device answers "
                f"{common.error_text(error)}; measure the rest without it and with --append"
            ) from error


def _check_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise OutOfTime


def _record_floor(
    shape: Shape, floor: head_floor.Floor, args: argparse.Namespace, results: common.Results
) -> None:
    products = {name: float(f"{ms:.5g}") for name, ms in floor.products.items()}
    results.extra["floors"].setdefault(str(shape), []).append(
        {"products_ms": products, "ways": floor.ways, "tokens_scaled_by": floor.scale}
    )
    rates = [
        f"{name} {ms:.3g} ms ({2e-9 * shape.tokens * shape.hidden * shape.vocab / ms:.0f} TFLOP/s)"
        for name, ms in floor.products.items()
    ]
    results.say(f"{shape}: cuBLAS {', '.join(rates)}")


def _fill(
    row: dict[str, Any],
    variant: Variant,
    mode: Mode,
    sets: Sequence[Inputs],
    want: Truth,
    args: argparse.Namespace,
    deadline: float,
) -> None:
    """Puts what was measured into ``row``; of a failing variant its error."""
    _check_time(deadline)
    base = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    try:
        with common.time_limit(min(args.row_limit, deadline - time.monotonic())):
            head = variant.make(mode)
            order = itertools.cycle(sets)
            work = lambda: call(head, next(order), mode)  # noqa: E731
            _time(row, work, args)
            if args.device == "cuda":
                row["peak_mib"] = _peak(lambda: call(head, sets[0], mode), base) / 2**20
            if gpu_state.available(args.device):
                row |= gpu_state.under(work)
            row |= errors(call(head, sets[0], mode), want)
    except common.TimeLimitReached as error:
        _check_time(deadline)  # the run's time, not the row's: the row stays unmeasured
        row["error"] = common.error_text(error)
    except Exception as error:  # a peer that cannot run this is a result
        row["error"] = common.error_text(error)


def _time(row: dict[str, Any], work: Callable[[], Any], args: argparse.Namespace) -> None:
    """The first call, and the median of as many as fit into half of the row's limit."""
    row["first_call_s"] = common.wall_s(work, args.device)
    second_s = common.wall_s(work, args.device)
    repeats = max(1, min(args.repeats, int(args.row_limit / 2 / max(second_s, 1e-9))))
    fastest, ms, slowest = common.spread_ms(work, args.device, warmup=1, repeats=repeats)
    row |= {"ms": ms, "ms_min": fastest, "ms_max": slowest, "of_floor": row["floor_ms"] / ms}


def call(head: Head, inputs: Inputs, mode: Mode) -> Outcome:
    """One forward, and the backward that ``mode`` asks for."""
    if not mode.hidden_grad:
        with torch.no_grad():
            return Outcome(*head(inputs.hidden, inputs.weight, inputs.target))
    logprob, entropy = head(inputs.hidden, inputs.weight, inputs.target)
    outputs, incoming = [logprob], [inputs.grad_logprob.to(logprob.dtype)]
    if mode.entropy_grad and entropy is not None:
        outputs.append(entropy)
        incoming.append(inputs.grad_entropy.to(entropy.dtype))
    wanted = [inputs.hidden, *([inputs.weight] if mode.weight_grad else [])]
    grads: tuple[Tensor, ...] = torch.autograd.grad(outputs, wanted, incoming)
    return Outcome(
        logprob.detach(),
        None if entropy is None else entropy.detach(),
        grads[0],
        grads[1] if mode.weight_grad else None,
    )


def _peak(work: Callable[[], Any], base: int) -> int:
    """Peak over ``base``, what was allocated before the variant's first call: what it keeps from
    call to call counts too."""
    common.free_memory("cuda")
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def _distribution(shape: Shape, want: Truth) -> str:
    found = want.outcome.logprob.quantile(want.outcome.logprob.new_tensor([0.1, 0.5, 0.9]))
    low, middle, high = found.tolist()
    return f"{shape}: log-probs have quantiles {low:.2f} (10 %), {middle:.2f}, {high:.2f} (90 %)"


# -- the command line


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
    parser.add_argument("--repeats", type=common.positive, default=9, help="timed calls a row (9)")
    parser.add_argument(
        "--sets", type=common.positive, default=3, help="input sets, used in turn (3)"
    )
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


# -- what the file says below its table, and how it is shown


_MODES = {
    "no_grad": "Log-probs without gradient; floor 2NHV",
    "frozen": "Frozen head, forward and backward; floor 4NHV",
    "trainable": "Trainable head, forward and backward; floor 8NHV",
    "frozen+entropy": "Frozen head, entropy logged; floor 4NHV",
    "frozen+softcap": f"Frozen head, softcap {SOFTCAP:g}; floor 4NHV",
    "frozen+entropy_grad": "Frozen head, entropy differentiated; floor 6NHV",
}


def _table(title: str, mode: str, cells: str) -> dict[str, Any]:
    return {
        "title": title,
        "where": {"mode": [mode]},
        "rows": "shape",
        "columns": "variant",
        "cells": cells,
    }


README = {
    "tables": [
        *(
            _table(title, mode, "{ms:.1f} ms, {of_floor:.0%}")
            | {"also": ["cuBLAS floor", "{floor_ms:.1f} ms"]}
            for mode, title in _MODES.items()
        ),
        _table("Frozen head: peak over the inputs, MiB", "frozen", "{peak_mib:.0f}"),
        _table("Frozen head: largest error of a log-prob", "frozen", "{logprob_error:.1e}"),
        _table("Frozen head: relative error of dH", "frozen", "{dh_error:.1e}"),
    ],
    "figures": ["time", "memory"],
}


def notes(args: argparse.Namespace) -> list[str]:
    """How it was measured."""
    rows = f"{args.error_rows} tokens, evenly spread" if args.error_rows else "all tokens"
    floors = ", ".join(f"{name} {2 * sum(MODES[name].products)}NHV" for name in MODES)
    return [
        f"shape: tokens N, hidden H, vocabulary V; {args.dtype}; {args.sets} input sets in turn; a "
        "percentage is floor_ms / ms",
        f"inputs: {args.inputs.about}; the gradient of the log-probs is N(0, 1)",
        "errors against float64 on the first set: largest of the log-probs (entropies), relative "
        f"L2 distance of dH, over {rows}; of dW over {CHECKED_VOCAB} rows of the head, evenly "
        "spread" + (" (not measured, as it sums over all tokens)" if args.error_rows else ""),
        f"floor: {floors}; cuBLAS through torch.mm, for each product the fastest of both layouts "
        "and of tiles of 2048 to all rows or columns, the mode's products in sequence, same run",
        f"softcap {SOFTCAP:g}; frozen+entropy: entropy without gradient, frozen+entropy_grad: with",
        "CCE, Liger's CuTe and verl's kernel make dW for a frozen head as well",
    ]


if __name__ == "__main__":
    sys.exit(main())
