"""A checkpoint's tensors by the names of the model's parameters, one at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.runtime.engine import EngineError
from fxrl.runtime.fp8_linear import FP8_DTYPES, dequantize, read_scale
from fxrl.runtime.hf_skeleton import optional

_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"


class CheckpointTensors:
    """Reads a folder's safetensors without ever holding more than one tensor.

    NOTE [Two ways to a tensor]
    A parameter whose very name is in the files is read from there. Checkpoints that transformers
    renames, splits or merges while loading (older naming schemes, mixtures of experts), or that are
    not in safetensors, are loaded once by transformers itself on the CPU, whole: it alone knows its
    conversions, and a guessed name would be a wrong weight.
    """

    def __init__(self, folder: Path, skeleton: nn.Module) -> None:
        self.folder = folder
        self._skeleton = skeleton
        self._files = _safetensors_of(folder)
        self._block = _fp8_block(getattr(skeleton, "config", None))
        self._open: dict[str, Any] = {}
        self._converted: dict[str, Tensor] | None = None

    def get(self, names: Sequence[str], shape: torch.Size) -> Tensor:
        """The tensor of one parameter, on the CPU, in the checkpoint's dtype; not to be written.

        FP8 weights come dequantized, in float32.

        Args:
            names: of the parameter; tied ones have several and are stored under one of them.
            shape: that it must have.

        Raises:
            EngineError: the checkpoint lacks it, or has it in another shape.
        """
        stored = next((name for name in names if name in self._files), None)
        if stored is not None:
            tensor = self._dequantized(stored, self._read(stored))
            if tensor.shape == shape:
                return tensor
        if self._converted is None:
            self._converted = self._convert()
        found = next((self._converted[name] for name in names if name in self._converted), None)
        if found is None or found.shape != shape:
            has = "lacks it" if found is None else f"has it as {tuple(found.shape)}"
            raise EngineError(
                f"checkpoint {str(self.folder)!r}: the model needs {names[0]!r} as {tuple(shape)}, "
                f"the checkpoint {has}; use the folder that vLLM has loaded"
            )
        return found

    def find(self, name: str) -> Tensor | None:
        """The tensor stored under this very name, as it is stored."""
        return self._read(name) if name in self._files else None

    def find_buffer(self, name: str) -> Tensor | None:
        """A persistent buffer; ``None`` if transformers finds none in the checkpoint either."""
        stored = self.find(name)
        if stored is None:
            self._converted = self._converted or self._convert()
            stored = self._converted.get(name)
        return stored

    def _dequantized(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in FP8_DTYPES:
            return tensor
        values = self.find(f"{name}_scale_inv")
        values = self.find(f"{name}_scale") if values is None else values
        scale = (
            "it has no scales"
            if values is None
            else read_scale(values.float(), tensor.shape, self._block)
        )
        if isinstance(scale, str):
            raise EngineError(
                f"checkpoint {str(self.folder)!r}: {name!r} is FP8 and {scale}; use the checkpoint "
                "in bf16, which vLLM can quantize itself (quantization='fp8_per_channel')"
            )
        return dequantize(tensor, scale, torch.float32)

    def _read(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._open:
            safetensors = optional("safetensors")
            self._open[file] = safetensors.safe_open(self.folder / file, framework="pt")
        tensor = self._open[file].get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def _convert(self) -> dict[str, Tensor]:
        loader = type(self._skeleton)
        assert hasattr(loader, "from_pretrained")
        try:
            model, info = loader.from_pretrained(
                str(self.folder), dtype="auto", local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise EngineError(
                f"checkpoint {str(self.folder)!r}: transformers cannot load it "
                f"({str(error).splitlines()[0][:200]}); shared weights need the folder that vLLM "
                "has loaded, with its weights"
            ) from error
        unset = set(info["missing_keys"])  # transformers has drawn these at random
        values = dict(model.named_parameters(remove_duplicate=False))
        values |= dict(model.named_buffers())
        return {name: value.detach() for name, value in values.items() if name not in unset}


def _fp8_block(config: Any) -> tuple[int, int]:
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    rows, columns = quantization.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _safetensors_of(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where the folder has no safetensors."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return dict(index["weight_map"])
    if not (folder / _ONE_FILE).is_file():
        return {}
    with optional("safetensors").safe_open(folder / _ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _ONE_FILE)
