"""The dtype of a run that names none: ``model.dtype = "auto"``.

NOTE [Why a CPU is asked]
A wrong guess costs minutes. Two cores with AVX2 take 46 ms for a product of 2048 x 576 x 1536 in
float32 and 344 ms in bfloat16, which they emulate; AVX-512 without bf16 is 2.7 times slower in it;
with AMX it is 3 times faster (the last two on a busy machine). The products are not all of a step:
norms, softmax and casts gain nothing, so bfloat16 has to be ahead clearly.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from fxrl.rl.config.tables import ModelConfig
from fxrl.rl.report.files import Tell

Fast = Literal["float32", "bfloat16"]
PRODUCT = (256, 576, 1536)
"""Tokens, in and out features: an MLP's product of SmolLM2-135M over a few completions."""
CLEARLY = 2.0
"""bfloat16 is taken where its product is so many times faster."""


def settle(
    model: ModelConfig,
    device: torch.device,
    saved: Mapping[str, Any] | None,
    tell: Tell,
) -> ModelConfig:
    """``model`` with ``auto`` replaced by a dtype; a given dtype stands.

    Frozen weights, under an adapter, are stored in the dtype that the device multiplies fastest.
    Trained weights stay float32, and only their products are computed in it. A GPU takes bfloat16
    without a measurement; a resumed run keeps the dtype of ``saved``, its ``[model]``.
    """
    if model.dtype != "auto":
        if torch.bfloat16 in model.trained_dtypes:
            tell(
                "model.dtype=bfloat16: an update of less than 1/512 of a weight is rounded away, "
                "at learning rates of RL nearly every one; model.dtype=float32 with "
                "model.autocast=bfloat16 keeps them, and so does an adapter (model.lora)"
            )
        return model
    if saved is not None:
        autocast = saved["autocast"] if model.autocast == "auto" else model.autocast
        return replace(model, dtype=saved["dtype"], autocast=autocast)
    fast: Fast = "bfloat16"
    if device.type == "cpu":
        times = product_times()
        fast = faster(times)
        took = " and ".join(f"{ms:.3g} ms in {name}" for name, ms in times.items())
        is_fast = "is at least" if fast == "bfloat16" else "is not"
        tell(
            f"the run is in {fast}: bfloat16 {is_fast} {CLEARLY:g} times as fast on this CPU (a "
            f"product of {' x '.join(map(str, PRODUCT))} takes {took}); model.dtype sets another"
        )
    frozen = model.adapted
    autocast = model.autocast
    if autocast == "auto":
        autocast = "bfloat16" if fast == "bfloat16" else None
    return replace(model, dtype=fast if frozen else "float32", autocast=autocast)


def faster(times: Mapping[Fast, float]) -> Fast:
    """The dtype for a CPU whose products take ``times`` [ms]."""
    return "bfloat16" if times["bfloat16"] * CLEARLY <= times["float32"] else "float32"


def product_times() -> dict[Fast, float]:
    """Milliseconds of one ``PRODUCT`` on this CPU, the best of three after one to warm up."""
    tokens, width, out = PRODUCT
    found: dict[Fast, float] = {}
    names: tuple[Fast, ...] = ("float32", "bfloat16")
    for name in names:
        dtype = getattr(torch, name)
        left, right = torch.ones(tokens, width, dtype=dtype), torch.ones(out, width, dtype=dtype)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            torch.nn.functional.linear(left, right)
            seconds.append(time.perf_counter() - start)
        found[name] = 1e3 * min(seconds[1:])
    return found
