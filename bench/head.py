"""The loss head alone: log-probs of given tokens from hidden states, fxrl beside its peers.

One row for each shape, mode and variant. A time is the median over rotated input sets, head
included; ``of_floor`` is the share of it that cuBLAS needs for the products no exact head can do
without, measured in the same run: 2NHV without gradient, 4NHV for a frozen head, 8NHV for a
trainable one. ``peak_mib`` is the allocator's peak over the inputs, so gradients count. Errors are
distances to float64. A variant that cannot run is a row with its error.

    python -m bench.head --shapes issue --out bench/results/head_h200.json
    python -m bench.head --shapes "16384,4096,151936" --modes frozen --variants fxrl,trl
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.lib import common
from bench.lib.head_case import (
    CHECKED_VOCAB,
    MODES,
    PEAK,
    SOFTCAP,
    Inputs,
    Mode,
    Outcome,
    Shape,
    Truth,
    errors,
    make_inputs,
    measure_floor,
    parse_shapes,
    truth,
)
from bench.lib.head_peers import VARIANTS, Head, Variant

COLUMNS = (
    "shape", "mode", "variant", "version", "ms", "ms_min", "ms_max", "floor_ms", "of_floor",
    "peak_mib", "logprob_error", "entropy_error", "dh_error", "dw_error", "first_call_s", "error",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_MODES = ("no_grad", "frozen", "trainable", "frozen+entropy", "frozen+softcap")


class TimeLimitReached(BaseException):
    """The row's time is over; not an ``Exception``, so that no library under test swallows it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; exit code 1 if the device was lost on the way."""
    args = _arguments(argv)
    results = common.Results("Loss head beside its peers", COLUMNS, args.out, _notes(args))
    results.extra["floors_ms"] = {}
    for shape in args.shapes:
        if lost := _shape(shape, args, results):
            results.notes.append(lost)
            results.finish()
            return 1
        common.free_memory(args.device)
    results.finish()
    return 0


def _shape(shape: Shape, args: argparse.Namespace, results: common.Results) -> str | None:
    """All rows of one shape; what to say if the device can no longer be used."""
    sets = [make_inputs(shape, DTYPES[args.dtype], args.device, seed) for seed in range(args.sets)]
    floor = measure_floor(sets, args.device, args.repeats)
    results.extra["floors_ms"][str(shape)] = vars(floor)
    common.free_memory(args.device)
    truths: dict[tuple[float, bool], Truth] = {}
    for mode in map(MODES.__getitem__, args.modes):
        key = mode.softcap, mode.entropy_grad
        if key not in truths:
            truths[key] = truth(sets[0], mode, args.error_rows)
            common.free_memory(args.device)
            if key == (0.0, False):
                results.notes.append(_peakedness(shape, truths[key]))
        for inputs in sets:
            inputs.require(mode)
        for variant in map(VARIANTS.__getitem__, args.variants):
            row = {"shape": str(shape), "mode": mode.name, "variant": variant.title}
            row |= {"version": variant.version, "floor_ms": floor.of(mode)}
            _fill(row, variant, mode, sets, truths[key], args)
            results.add(**row)
            try:
                common.free_memory(args.device)
            except RuntimeError as error:
                return (
                    f"stopped: after {variant.title} on {shape}, {mode.name}, the device answers "
                    f"{common.error_text(error)}; measure the rest without it"
                )
    return None


def _fill(
    row: dict[str, Any],
    variant: Variant,
    mode: Mode,
    sets: Sequence[Inputs],
    want: Truth,
    args: argparse.Namespace,
) -> None:
    """Puts what was measured into ``row``; of a failing variant its error."""
    base = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    try:
        with _time_limit(args.time_limit):
            head = variant.make(mode)
            order = itertools.cycle(sets)
            _time(row, lambda: call(head, next(order), mode), args)
            if args.device == "cuda":
                row["peak_mib"] = _peak(lambda: call(head, sets[0], mode), base) / 2**20
            row |= errors(call(head, sets[0], mode), want)
    except (Exception, TimeLimitReached) as error:  # a peer that cannot run this is a result
        row["error"] = common.error_text(error)


def _time(row: dict[str, Any], work: Callable[[], Any], args: argparse.Namespace) -> None:
    """The first call, and the median of as many as fit into half of the time limit."""
    row["first_call_s"] = common.wall_s(work, args.device)
    second_s = common.wall_s(work, args.device)
    repeats = max(1, min(args.repeats, int(args.time_limit / 2 / max(second_s, 1e-9))))
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


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeLimitReached`` in the main thread at its next bytecode after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeLimitReached(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)  # again, if a finaliser swallowed it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _peakedness(shape: Shape, want: Truth) -> str:
    found = want.outcome.logprob.quantile(want.outcome.logprob.new_tensor([0.1, 0.5, 0.9]))
    low, middle, high = found.tolist()
    return f"{shape}: log-probs have quantiles {low:.2f} (10 %), {middle:.2f}, {high:.2f} (90 %)"


def _notes(args: argparse.Namespace) -> list[str]:
    rows = f"{args.error_rows} tokens, evenly spread" if args.error_rows else "all tokens"
    floors = ", ".join(f"{name} {2 * MODES[name].products}NHV" for name in args.modes)
    return [
        f"shape: tokens N, hidden H, vocabulary V; {args.dtype}; {args.sets} input sets in turn",
        "inputs: head 0.02 N(0, 1); hidden N(0, 1) plus the multiple of the target's row that "
        f"lifts its logit by U(0, {PEAK:g}); the gradient of the log-probs is N(0, 1)",
        "errors against float64 on the first set: largest of the log-probs (entropies), relative "
        f"L2 distance of dH, over {rows}; of dW over {CHECKED_VOCAB} rows of the head, evenly "
        "spread" + (" (not measured, as it sums over all tokens)" if args.error_rows else ""),
        f"floor: {floors}; torch.mm on the exact shapes (tokens cut and time scaled where the "
        "logits exceed 16 GiB); of_floor is floor_ms / ms",
        f"softcap {SOFTCAP:g}; frozen+entropy: entropy without gradient, frozen+entropy_grad: with",
        "CCE, Liger's CuTe and verl's kernel make dW for a frozen head as well",
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    default = "issue" if torch.cuda.is_available() else "256,64,1000"
    parser.add_argument(
        "--shapes", type=parse_shapes, default=default, help="N,H,V;N,H,V or 'issue'"
    )
    parser.add_argument(
        "--variants", type=_names(VARIANTS, "variant"), default="all", help=", ".join(VARIANTS)
    )
    parser.add_argument(
        "--modes", type=_names(MODES, "mode"), default=DEFAULT_MODES, help=", ".join(MODES)
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=_positive, default=9, help="timed calls a row")
    parser.add_argument("--sets", type=_positive, default=3, help="input sets, used in turn")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds a row may take, compiling included"
    )
    parser.add_argument(
        "--error-rows", type=int, default=0, help="check so many tokens instead of all"
    )
    args = parser.parse_args(argv)
    if args.time_limit <= 0 or args.error_rows < 0:
        parser.error("--time-limit must be positive and --error-rows not negative")
    return args


def _names(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"no {what} {', '.join(unknown)}; there are {', '.join(known)} and all"
            )
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
