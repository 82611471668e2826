"""The train step: one GRPO update of a LoRA model, fxrl beside eager PyTorch and torch.compile.

Time, peak memory, and the distance of the gradients to fp32 (bench/update_step.py), at sizes that
fit this machine unless options say otherwise: Qwen3-8B's shape and 16384 completion tokens on a GPU
of 64 GiB or more, Qwen3-1.7B's and 4096 on a smaller one, a two-layer model on a CPU. The step with
rollouts, beside TRL, is ``fxrl bench rollout step``.

    fxrl bench step
    fxrl bench step --variants eager,fxrl --ref-seeds 0 --out bench/results/step.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench import update_step

_LARGE = 64 * 2**30
_ON_CPU: dict[str, Any] = {
    "shape": "tiny", "tokens": 128, "completion": 32, "prompt": 8, "attention": "any",
    "repeats": 5, "ref_layers": 2, "ref_tokens": 64, "ref_seeds": 1, "rank": 8,
}  # fmt: skip
_ON_SMALL_GPU: dict[str, Any] = {"shape": "qwen3-1.7b", "tokens": 4096, "attention": "any"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if fxrl failed in a row."""
    parser = update_step.build_parser(__doc__)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--device", default=parser.get_default("device"))
    device = chosen.parse_known_args(argv)[0].device
    parser.set_defaults(variants=["eager", "compile", "fxrl"], **_fitting(device))
    return update_step.run(parser.parse_args(argv))


def _fitting(device: str) -> dict[str, Any]:
    """Defaults for the device; a wrong name is left for the parser to refuse."""
    if device != "cuda" or not torch.cuda.is_available():
        return _ON_CPU
    memory = torch.cuda.get_device_properties(0).total_memory
    return {} if memory >= _LARGE else _ON_SMALL_GPU


if __name__ == "__main__":
    sys.exit(main())
