"""``fxrl.Config``: everything a user may decide, and the only place where defaults live.

It reads no environment. Byte sizes are given as ``int`` bytes or as text such as ``"75GiB"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fxrl.errors import ConfigError, check_one_of, did_you_mean

MiB = 2**20
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """``75 * 2**30``, ``"75GiB"`` or ``"512 MB"`` as a number of bytes.

    Raises:
        ConfigError: the text is not a number with a unit, or the size is negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size: float = value
    else:
        match = re.fullmatch(r"\s*(-?[0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{name}={value!r} is not a size; write bytes or a text like '75GiB'")
        size = float(match[1]) * _UNITS[match[2].upper()]
    if size < 0:
        raise ConfigError(f"{name}={value!r} is negative; a size is at least 0 bytes")
    return int(size)


@dataclass(frozen=True, slots=True)
class Config:
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

    chunk_tokens: int | None = None
    min_saved_bytes: int | str = 32 * MiB
    gpu_memory: int | str | None = None
    host_memory: int | str | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    compile_regions: bool = True
    on_miss: Literal["warn", "error", "ignore"] = "warn"
    inductor: Mapping[str, Any] | None = None
    passes: tuple[str, ...] | None = None
    context_parallel: int = 1
    pass_options: Mapping[str, Any] | None = None

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
        tokens = self.chunk_tokens
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool)):
            raise ConfigError(
                f"chunk_tokens={tokens!r} is not a whole number of rows, such as 1024"
            )
        if tokens is not None and tokens < 1:
            raise ConfigError(f"chunk_tokens={tokens} is below 1; use None to plan it")
        ranks = self.context_parallel
        if not isinstance(ranks, int) or isinstance(ranks, bool):
            raise ConfigError(
                f"context_parallel={ranks!r} is not a whole number of ranks, such as 2"
            )
        if ranks < 1:
            raise ConfigError(f"context_parallel={ranks} is below 1; 1 shares nothing")
        saved = parse_bytes(self.min_saved_bytes, name="min_saved_bytes")
        object.__setattr__(self, "min_saved_bytes", saved)
        for name in ("gpu_memory", "host_memory"):
            if (value := getattr(self, name)) is not None:
                parse_bytes(value, name=name)
        check_one_of("precision", self.precision, ("bf16", "fp16", "fp32", "fp8"))
        check_one_of("on_miss", self.on_miss, ("warn", "error", "ignore"))
        if not isinstance(self.compile_regions, bool):
            raise ConfigError(f"compile_regions={self.compile_regions!r} is neither True nor False")
        if not isinstance(self.inductor, Mapping | None):
            raise ConfigError(
                f"inductor={self.inductor!r} is no mapping of options, such as "
                "{'max_autotune': True}"
            )
        told = {} if self.pass_options is None else self.pass_options
        if not isinstance(told, Mapping) or not all(isinstance(v, Mapping) for v in told.values()):
            raise ConfigError(
                f"pass_options={told!r} is no mapping of passes to their options, such as "
                "{'fp8-lora': {'recipe': 'block'}}"
            )
        if isinstance(self.passes, str) or not isinstance(self.passes, Iterable | None):
            raise ConfigError(
                f"passes={self.passes!r} is no list of names; write [{self.passes!r}]"
            )
        if self.passes is not None:
            object.__setattr__(self, "passes", tuple(self.passes))
