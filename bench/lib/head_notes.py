"""What the head benchmark's file says below its table, and how the README shows it."""

from __future__ import annotations

import argparse
from typing import Any

from bench.lib.head_case import CHECKED_VOCAB, MODES, SOFTCAP

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
