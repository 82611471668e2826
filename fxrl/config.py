"""``fxrl.Config``: everything a user may decide, and the only place where defaults live.

It reads no environment. Byte sizes are given as ``int`` bytes or as text such as ``"75GiB"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fxrl.errors import ConfigError, did_you_mean
from fxrl.options import Check, Options, at_least

MiB = 2**20
_PASS_OPTIONS = "{'fp8-lora': {'recipe': 'block'}}"
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """``75 * 2**30``, ``"75GiB"`` or ``"512 MB"`` as a number of bytes.

    Raises:
        ConfigError: the text is not a number with a unit, or the size is negative.
    """
    if why := _no_size(value):
        raise ConfigError(f"{name}={value!r} {why}")
    return int(_number_of_bytes(value))


def _number_of_bytes(value: int | str) -> float:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(-?[0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _UNITS:
        return math.nan
    return float(match[1]) * _UNITS[match[2].upper()]


def _no_size(value: int | str) -> str | None:
    size = _number_of_bytes(value)
    if math.isnan(size):
        return "is not a size; write bytes or a text like '75GiB'"
    return "is negative; a size is at least 0 bytes" if size < 0 else None


Size = Annotated[int | str, Check(_no_size, {}), "write bytes or '75GiB'"]
"""Bytes, or a text such as ``"75GiB"``."""


@dataclass(frozen=True, slots=True)
class Config(Options):
    """How ``fxrl.optimize`` works.

    Attributes:
        chunk_tokens: rows per tile of a chunked region; ``None`` lets the sizes decide.
        min_saved_bytes: a rewrite predicted to save less is left out (and reported as missed);
            bytes or ``"32MiB"``.
        gpu_memory: what a step may have on the GPU at its height, bytes or ``"75GiB"``: weights,
            optimizer and fragments included. Layers keep, offload or run again what fits it; where
            nothing does, ``PlanError`` says how long a context would. ``None`` takes what is free.
        host_memory: a host's pinned memory that activations may wait in, likewise; several ranks of
            a host share it. ``None`` takes most of what is free, and 0 sends nothing there.
        precision: ``"fp8"`` multiplies by frozen weights in FP8 (pass ``fp8-lora``); the others,
            ``"bf16"``, ``"fp16"`` and ``"fp32"``, leave products in the model's own dtype.
        compile_regions: ``False`` runs region bodies op by op, for exact float64 tests.
        on_miss: ``"warn"``, ``"error"`` (raise ``MissedRewriteError``) or ``"ignore"``.
        inductor: extra Inductor options for region bodies, on top of fxrl's own.
        passes: names of the passes to run, in whatever order: the pipeline has its own. ``None``
            runs all.
        context_parallel: how many consecutive ranks share each sequence. All of them are given the
            same whole batch, and have the whole loss and gradients afterwards. More than 1 needs
            ``torch.distributed``, and as many processes or a multiple.
        pass_options: name of a pass -> its options by name, which are its fields: ``{"fp8-lora":
            {"recipe": "block", "skip": ["k_proj"]}}``. They win over what the other keys say.
    """

    chunk_tokens: Annotated[int, at_least(1, "use None to plan it"), "write 1024"] | None = None
    min_saved_bytes: Size = 32 * MiB
    gpu_memory: Size | None = None
    host_memory: Size | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    compile_regions: bool = True
    on_miss: Literal["warn", "error", "ignore"] = "warn"
    inductor: Annotated[Mapping[str, Any], "write {'max_autotune': True}"] | None = None
    passes: Annotated[tuple[str, ...], "write ['recompute', 'offload']"] | None = None
    context_parallel: Annotated[int, at_least(1, "1 shares nothing"), "write 2"] = 1
    pass_options: Annotated[Mapping[str, Any], f"write {_PASS_OPTIONS}"] | None = None

    def __new__(cls, *args: Any, **options: Any) -> Config:
        """Refuse an unknown option by name, before ``__init__`` would.

        Raises:
            ConfigError: an option is unknown, of the wrong type, or out of range.
        """
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise ConfigError(
                    f"Config has no option {name!r}{did_you_mean(name, cls.__dataclass_fields__)}"
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.passes, Iterable) and not isinstance(self.passes, str):
            object.__setattr__(self, "passes", tuple(self.passes))  # a set does as well
        Options.__post_init__(self)
        object.__setattr__(self, "min_saved_bytes", parse_bytes(self.min_saved_bytes))

    def problems(self) -> Iterator[str]:
        told = self.pass_options or {}
        if not all(isinstance(options, Mapping) for options in told.values()):
            yield (
                f"pass_options={told!r} is no mapping of passes to their options, such as "
                f"{_PASS_OPTIONS}"
            )
