"""A checkpoint in two halves: its model without weights, and its tensors one at a time."""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.errors import optional, reason_of
from fxrl.models.hf import ModelError
from fxrl.ops.fp8 import dequantized, read_scale

_PURPOSE = "reading a checkpoint"
log = logging.getLogger(__name__)


def build_skeleton(checkpoint_dir: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model that ``AutoModelForCausalLM.from_pretrained`` would make, before its weights.

    NOTE [Why buffers are made for real]
    Non-persistent buffers (rotary frequencies, position ids) are in no checkpoint: only the
    module's own ``__init__`` knows them. So only parameters go to the meta device, and buffers are
    computed on the CPU, where ``from_pretrained`` computes them: the bits are the same.

    Args:
        checkpoint_dir: a folder with ``config.json`` and, maybe, ``generation_config.json``.
        dtype: of the parameters; None is the configuration's.
    """
    hf, accelerate = optional("transformers", _PURPOSE), optional("accelerate", _PURPOSE)
    where = str(checkpoint_dir)
    try:
        config = hf.AutoConfig.from_pretrained(where, local_files_only=True)
        config._name_or_path = where  # what PEFT writes into an adapter as its base
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            accelerate.init_empty_weights(include_buffers=False),
        ):
            model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, AssertionError) as error:
        raise ModelError(
            f"{where!r}: transformers {hf.__version__} makes no causal LM of its configuration "
            f"({reason_of(error)}); use a decoder-only language model"
        ) from error
    model.tie_weights()  # registering the parameters on the meta device untied them
    _init_buffers(model)
    if (checkpoint_dir / "generation_config.json").is_file():
        model.generation_config = hf.GenerationConfig.from_pretrained(where, local_files_only=True)
    assert isinstance(model, nn.Module)
    return model.eval()


@torch.no_grad()
def _init_buffers(model: Any) -> None:
    """What ``from_pretrained`` does: ``__init__`` ran in the model's dtype, in which some modules
    (GPT-J's positions) round what their ``_init_weights`` computes in float32."""
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                model._init_weights(module)


def parameter_groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of every parameter; tied ones together, in the order of the modules."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values()]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the attribute's name."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def put_parameter(model: nn.Module, names: Sequence[str], value: Tensor) -> None:
    """One parameter of ``value``, under each of the names that are tied to it."""
    parameter = nn.Parameter(value)
    for name in names:
        setattr(*owner_of(model, name), parameter)


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A weight that is multiplied by, or looked up in."""

    weight: Tensor  # in full
    # The modules that compute with it, by path; tied ones are several.
    holders: dict[str, nn.Module]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameter, one per holder."""
        return tuple(f"{path}.weight" for path in self.holders)


def held_weights(model: nn.Module) -> list[HeldWeight]:
    """The weights of a model's plain Linears and embeddings that nothing else computes with."""
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found: dict[int, HeldWeight] = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear or (type(module) is nn.Embedding and module.max_norm is None):
            held = found.setdefault(id(module.weight), HeldWeight(module.weight, {}))
            held.holders[path] = module
    return [held for key, held in found.items() if names[key] == len(held.holders)]


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
        self._files = stored_names(folder)
        self._sorted = sorted(self._files)
        self._open: dict[str, Any] = {}

    def get(self, names: Sequence[str], shape: torch.Size) -> Tensor:
        """The tensor of one parameter, of this shape, on the CPU in the checkpoint's dtype; do not
        write to it. FP8 weights are dequantized to float32. A tied parameter has several ``names``,
        and is stored under one of them."""
        if (stored := self._stored(names)) is not None:
            tensor = self._dequantized(stored, self._read(stored))
            if tensor.shape == shape:
                return tensor
        found = next((self._converted[name] for name in names if name in self._converted), None)
        if found is None or found.shape != shape:
            has = "lacks it" if found is None else f"has it as {tuple(found.shape)}"
            raise ModelError(
                f"checkpoint {str(self.folder)!r}: the model needs {names[0]!r} as {tuple(shape)}, "
                f"the checkpoint {has}; complete the download, or correct config.json"
            )
        return found

    def rows(self, names: Sequence[str], shape: torch.Size, start: int, stop: int) -> Tensor:
        """Rows of one parameter, likewise; no more is read where it is stored under its name."""
        if (name := self._stored(names)) is not None:
            stored = self._file(name).get_slice(name)
            if tuple(stored.get_shape()) == tuple(shape):
                found: Tensor = stored[start:stop]
                if found.is_floating_point() and found.itemsize > 1:
                    return found
        return self.get(names, shape)[start:stop]

    def beside(self, path: str) -> dict[str, Tensor]:
        """All that is stored of a module without modules of its own, by names behind its path."""
        prefix, names = f"{path}.", self._sorted
        inside = takewhile(lambda n: n.startswith(prefix), names[bisect_left(names, prefix) :])
        return {name.removeprefix(prefix): self._read(name) for name in inside}

    def fill(self, device: torch.device | str) -> None:
        """Reads what the skeleton has on ``meta`` to a device; its buffers likewise."""
        for names in parameter_groups(self._skeleton):
            empty = getattr(*owner_of(self._skeleton, names[0]))
            if empty.is_meta:
                tensor = self.get(names, empty.shape).to(device, empty.dtype, copy=True)
                put_parameter(self._skeleton, names, tensor)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        """Persistent buffers (routing biases) are small, and the checkpoint's values count."""
        for path, module in self._skeleton.named_modules():
            for name, value in module.named_buffers(recurse=False):
                # Not asked of ``state_dict``, which packs each weight of 4 bits anew.
                if name in module._non_persistent_buffers_set:
                    continue
                full = f"{path}.{name}".lstrip(".")
                stored = self._read(full) if full in self._files else self._converted.get(full)
                if stored is not None and stored.shape == value.shape:
                    value.copy_(stored)

    def _stored(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._files), None)

    def _dequantized(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.itemsize > 1:
            return tensor
        stored = self._stored((f"{name}_scale_inv", f"{name}_scale"))
        try:
            if stored is None:
                raise ValueError("it has no scales")
            scale = read_scale(self._read(stored), tensor.shape)
            return dequantized(tensor, scale, torch.float32)
        except ValueError as error:
            raise ModelError(
                f"checkpoint {str(self.folder)!r}: {name!r} is FP8 and {error}; use the checkpoint "
                "in bf16"
            ) from error

    def _read(self, name: str) -> Tensor:
        tensor = self._file(name).get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def _file(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            safetensors = optional("safetensors", _PURPOSE)
            self._open[file] = safetensors.safe_open(self.folder / file, framework="pt")
        return self._open[file]

    @cached_property
    def _converted(self) -> dict[str, Tensor]:
        """What transformers itself makes of the checkpoint; see NOTE [Two ways to a tensor]."""
        loader = type(self._skeleton)
        log.warning(
            "checkpoint %r names tensors otherwise than the model, or is not in safetensors, so "
            "transformers loads all of it on the host; what save_pretrained writes of it is read "
            "tensor by tensor",
            str(self.folder),
        )
        assert hasattr(loader, "from_pretrained")
        try:
            model, info = loader.from_pretrained(
                str(self.folder), dtype="auto", local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"checkpoint {str(self.folder)!r}: transformers cannot load it "
                f"({reason_of(error)}); the folder needs its weights"
            ) from error
        unset = set(info["missing_keys"])  # transformers has drawn these at random
        values = dict(model.named_parameters(remove_duplicate=False))
        values |= dict(model.named_buffers())
        return {name: value.detach() for name, value in values.items() if name not in unset}


def stored_names(folder: Path) -> dict[str, str]:
    """Name of each tensor -> its file's; empty where the folder has no safetensors."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return dict(index["weight_map"])
    if not (folder / _ONE_FILE).is_file():
        return {}
    with optional("safetensors", _PURPOSE).safe_open(folder / _ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _ONE_FILE)
