"""Models from a configuration alone: random weights, or no weights at all on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.errors import optional
from fxrl.models.hf import ModelError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"bf16"``, ``"bfloat16"`` or ``torch.bfloat16`` as a dtype.

    Raises:
        ModelError: no such floating-point dtype.
    """
    if isinstance(dtype, torch.dtype):
        found: object = dtype
    else:
        found = DTYPES.get(dtype) or getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        names = ", ".join(map(repr, DTYPES))
        raise ModelError(f"dtype={dtype!r} is no floating-point dtype; use one of {names}")
    return found


def build_from_config(
    config: str | Path | Mapping[str, Any] | Any,
    dtype: str | torch.dtype = "bf16",
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
) -> nn.Module:
    """A causal LM of this configuration with random weights.

    Args:
        config: path of a ``config.json``, its contents, or a ``PretrainedConfig``.
        dtype: of the weights.
        device: ``"meta"`` allocates nothing: enough to trace and explain a model of any size
            (under ``FakeTensorMode`` any device does that too).
        seed: of the weights, which ``device``'s generator draws: a GPU makes others than the CPU.
            The global generators are left as they were.

    Raises:
        ModelError: no such file, no JSON, or no causal LM.
        MissingPackageError: transformers is not installed.
    """
    hf = optional("transformers", "building a model")
    parsed = read_config(config)
    with torch.random.fork_rng(devices=_cuda_devices(device)), torch.device(device):
        torch.manual_seed(seed)
        try:
            model = hf.AutoModelForCausalLM.from_config(parsed, dtype=as_dtype(dtype))
        except ValueError as error:
            raise ModelError(
                f"{type(parsed).__name__}: transformers {hf.__version__} makes no causal LM of it "
                f"({_first_line(error)}); use a decoder-only language model"
            ) from error
    assert isinstance(model, nn.Module)
    return model


def read_config(config: str | Path | Mapping[str, Any] | Any) -> Any:
    """A ``PretrainedConfig`` of a JSON file, a dict, or the same object again.

    Raises:
        ModelError: no such file, no JSON, no ``model_type``, or an unknown one.
    """
    hf = optional("transformers", "reading a model's configuration")
    if not isinstance(config, str | Path | Mapping):
        return config
    if isinstance(config, Mapping):
        name, values = "config", dict(config)
    else:
        name = str(config)
        try:
            values = json.loads(Path(config).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"{name!r}: {error.strerror}; give a config.json's path") from error
        except ValueError as error:
            raise ModelError(f"{name!r} is not JSON ({error}); give a config.json") from error
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if kind is None:
        raise ModelError(f"{name!r} has no model_type; give a Hugging Face model's config.json")
    try:
        return hf.AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise ModelError(
            f"{name!r}: model_type={kind!r} does not work with transformers {hf.__version__} "
            f"({_first_line(error)}); correct it, or upgrade transformers"
        ) from error


def _cuda_devices(device: str | torch.device) -> list[torch.device]:
    device = torch.device(device)
    return [device] if device.type == "cuda" else []


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
