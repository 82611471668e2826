"""How a decode step's layers are compiled inside vLLM, and how their FP8 products are scaled.

Kernel and choices are derived from classes that are handed in, so this file imports neither vLLM
nor Inductor.

NOTE [Why a norm's row stays in registers]
A decode step has few rows, each as wide as the model: a kernel that normalizes and quantizes one
waits for memory and not for bandwidth. Inductor reads a row of more than 1024 entries once for
every pass over it (sum of squares, largest entry, result). Up to ``LONGEST_ROW`` entries it now
keeps them in registers: 3.2 and 3.7 us instead of 3.9 and 5.3 for the two norms of a layer of
Qwen3-8B in FP8, 128 sequences, an H200.

NOTE [Why kernels are joined untried]
Inductor joins independent kernels (the norms of queries and keys, their rotations) into one, and
vLLM has it time each such kernel against its parts, which costs an engine's first start 1 to 5 of
46 s. On an H200 the trial never mattered: steps of 64, 128 and 256 sequences of Llama-3.1-8B,
Qwen3-8B, Qwen3-1.7B and Qwen2.5-1.5B take as long without it.

NOTE [Which FP8 products leave their scales to who reads them]
vLLM's CUTLASS product multiplies with the scales of tokens and channels in its epilogue; cuBLAS,
with one scale for all, is faster where a layer is narrow, no wider than deep, as an attention's
output and an MLP's second layer are. Of Qwen3-8B on an H200, us with 128 and 256 sequences:

    attention's output    cuBLAS  8.0   9.6    CUTLASS 10.3  14.7
    MLP's second layer           18.8  22.6            22.9  33.8
    q, k, v                       9.5  11.9            11.3  15.1
    gate and up                  30.7  40.6            30.8  42.1

The scales are then multiplied in by the kernel that reads the result, which Inductor fuses: for a
narrow layer that is the residual's addition and the next norm, for nothing; for q, k, v and gate
and up it is several kernels, or one that is bound by it, and they lost more than the product had
gained. The result is rounded to bf16 once, before the scales instead of after them, and its
exponent has room for sums without scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxrl.engines.vllm.options import HOPPER, VllmOptions

LONGEST_ROW = 16384
"""Entries that a block's registers hold."""

NO_TRIALS: Mapping[str, Any] = {"benchmark_combo_kernel": False}
"""See NOTE [Why kernels are joined untried]."""

_INDUCTOR = "inductor_compile_config"


def wanted(options: VllmOptions, capability: tuple[int, int] | None) -> bool:
    """Whether an engine's layers run so: on Hopper, where that was measured, and in this process;
    others have compilers and registries of their own. ``capability`` is the GPU's, if any."""
    return options.decode_layers and capability == HOPPER and options.tensor_parallel_size == 1


def with_inductor(options: VllmOptions, settings: Mapping[str, Any]) -> VllmOptions:
    """The same with settings for what vLLM compiles, beside which the user's own win."""
    given = options.compilation_config
    config: dict[str, Any] = {"mode": given} if isinstance(given, int) else dict(given or {})
    config[_INDUCTOR] = {**settings, **config.get(_INDUCTOR, {})}
    return replace(options, compilation_config=config)


def make_choices(base: Any) -> type:
    """Of Inductor's ``InductorChoices``: see NOTE [Why a norm's row stays in registers]."""

    class RowChoices(base):  # type: ignore[misc]
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            row = features.reduction_numel
            whole = (
                not cooperative_reduction
                and features.get_reduction_hint().name == "INNER"
                and row.is_Integer
                and bool(row <= LONGEST_ROW)
            )
            if whole:
                return True
            theirs: bool = base.should_use_persistent_reduction(features, cooperative_reduction)
            return theirs

        def uuid(self) -> str:
            """Its part in the key of Inductor's cache."""
            return f"{RowChoices.__qualname__} {LONGEST_ROW}"

    return RowChoices


def make_kernel(base: Any) -> type:
    """A kernel for vLLM's FP8 layers: see NOTE [Which FP8 products leave their scales ...].

    Args:
        base: vLLM's ``CutlassFP8ScaledMMLinearKernel``, or another one whose weights are [in, out]
            with a scale for each channel; it multiplies where a layer is wide.
    """

    class NarrowProducts(base):  # type: ignore[misc]
        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            tokens = c.activation_quant_key.scale.group_shape.is_per_token()
            if not (tokens and c.weight_quant_key.scale.group_shape.is_per_channel()):
                return False, "requires a scale for each token and each channel."
            able: tuple[bool, str | None] = base.can_implement(c)
            return able

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            weight, scale, *_ = self._get_layer_params(layer)
            depth, width = weight.shape
            padded = depth % 16 != 0 or width % 16 != 0
            self.narrow = width <= depth and scale.shape == (width, 1) and not padded
            self.one = torch.ones(1, dtype=torch.float32, device=weight.device)

        def apply_scaled_mm(
            self,
            *,
            A: Tensor,
            B: Tensor,
            out_dtype: torch.dtype,
            As: Tensor,
            Bs: Tensor,
            bias: Tensor | None,
            output_shape: list[int],
        ) -> Tensor:
            if not self.narrow:
                made: Tensor = super().apply_scaled_mm(
                    A=A, B=B, out_dtype=out_dtype, As=As, Bs=Bs, bias=bias,
                    output_shape=output_shape,
                )  # fmt: skip
                return made
            product: Tensor = torch.ops.aten._scaled_mm(
                A, B, self.one, self.one, out_dtype=out_dtype, use_fast_accum=True
            )
            scaled = product * (As * Bs.t())
            if bias is not None:
                scaled = scaled + bias
            rounded: Tensor = scaled.to(out_dtype)
            return rounded.view(*output_shape)

    return NarrowProducts


@contextmanager
def offered(kernels: list[Any], kernel: type) -> Iterator[None]:
    """Puts ``kernel`` first of vLLM's, which it asks in this order, while an engine is built: its
    layers keep what they found, and other engines' find nothing of it."""
    kernels.insert(0, kernel)
    try:
        yield
    finally:
        kernels.remove(kernel)
