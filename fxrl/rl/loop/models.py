"""The models of a run: the one it trains, with its adapter and value head, and the teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.dtypes import at_least_float32
from fxrl.errors import ConfigError
from fxrl.losses import ValueHead
from fxrl.models import (
    ModelError,
    Peers,
    QuantizedLinear,
    load_model,
    lora,
    offload_embeddings,
    quantize,
    shard,
)
from fxrl.models.hf import VALUE_HEAD, load_value_head, train_without_cache
from fxrl.models.load import is_random, model_folder, write_model
from fxrl.models.quantized import as_quantization, in_bits
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.report.files import try_to_write
from fxrl.rl.report.progress import Stage


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device={name!r}: PyTorch sees no GPU; use auto or cpu")
    return device


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run, and how its own is come by; ``made`` gets weights no folder has."""

    config: TrainConfig
    tokenizer: Any  # the model's own, or that of its adapter's folder
    device: torch.device
    made: Path
    peers: Peers | None
    stage: Stage

    def load(self) -> tuple[nn.Module, Any]:
        """The model of ``[model]``, of an adapter its base model, and its tokenizer. One whose
        weights no folder has is written to ``made``, for whoever loads the adapter."""
        wanted, tokenizer = self.config.model, self.tokenizer
        if isinstance(wanted.id, nn.Module):
            model = wanted.id.to(self.device)
        else:
            with self.stage(f"loading {self._words}") as say:
                model, own = self._read(say)
                if wanted.adapter is None:  # else its folder may have another
                    tokenizer = own
        if wanted.lora is not None and self._is_only_here:
            try_to_write(lambda: write_model(model, tokenizer, self.made), str(self.made))
        in_memory = self._is_only_here or isinstance(wanted.id, nn.Module)
        if self.peers is not None and in_memory:
            if wanted.quantization is not None:  # what is shared out stays as it is
                model = in_bits(model, as_quantization(wanted.quantization))
            model = shard(model, self.peers, trained=True)
        return model, tokenizer

    def _read(self, say: Callable[[str], None]) -> tuple[nn.Module, Any]:
        wanted, only_here = self.config.model, self._is_only_here
        return load_model(
            self._base_name,
            wanted.dtype,
            self.device,
            seed=self.config.seed,
            # Random weights are written down in full first.
            quantization=None if only_here else wanted.quantization,
            scalar_head=self.config.loss_info().scalar_head,
            peers=None if only_here else self.peers,
            on_progress=say,
        )

    def folder(self) -> tuple[Path, Any]:
        """The folder that an engine loads this model from, and its tokenizer; ``made`` where it is
        made first."""
        dtype, seed = self.config.model.dtype, self.config.seed
        find = partial(model_folder, self._base_name, self.made, dtype=dtype, seed=seed)
        with self.stage(f"finding {self._words}") as say:
            return try_to_write(partial(find, on_progress=say), str(self.made))

    @property
    def _base_name(self) -> str:
        wanted = self.config.model
        return wanted.name if wanted.adapter is None else wanted.adapter.base

    @property
    def _words(self) -> str:
        return f"{self.config.model.name} ({self.config.model.dtype}, {self.device})"

    @property
    def _is_only_here(self) -> bool:
        """Whether no folder or hub has the weights."""
        model_id = self.config.model.id
        if isinstance(model_id, str):
            return is_random(model_id)
        return not getattr(model_id, "name_or_path", "")

    def trainable(self, model: nn.Module) -> nn.Module:
        """The model with its adapter, value head and checkpointing, in train mode."""
        wanted = self.config.model
        head = model._modules.pop(VALUE_HEAD, None)  # which an adapter would freeze, or adapt
        if not wanted.adapted and any(isinstance(m, QuantizedLinear) for m in model.modules()):
            raise ModelError(
                f"model.id={wanted.name!r} holds its Linears in 8 or 4 bits, which cannot be "
                "trained; add [model.lora], or give the checkpoint in bf16"
            )
        if wanted.adapted:
            model = self._adapted(model)
        loaded_so = wanted.sharded or (isinstance(wanted.id, str) and not self._is_only_here)
        if wanted.quantization is not None and not loaded_so:
            model = quantize(model, wanted.quantization)
        if wanted.offload_embeddings:
            model = offload_embeddings(model)
        if wanted.gradient_checkpointing:
            _checkpoint(model)
            if wanted.adapted:
                model.enable_input_require_grads()  # type: ignore[operator]
        judged = self.config.loss_info().critic is not None
        if judged or head is not None:
            trained = next(p.dtype for p in model.parameters() if p.requires_grad)
            if head is None:
                head = ValueHead(model, trained)
                load_value_head(head, Path(wanted.name).expanduser())
            model.value_head = head.requires_grad_(judged)
        return model.train()

    def _adapted(self, model: nn.Module) -> nn.Module:
        wanted, new, seed = self.config.model, self.config.model.lora, self.config.seed
        base: Any = model  # its name goes into the adapter's configuration
        place = self.made if self._is_only_here else Path(base.name_or_path or wanted.name)
        base.name_or_path = str(place.resolve() if place.is_dir() else place)
        if wanted.adapter is not None:
            model = wanted.adapter.put_on(model)
        elif new is not None:
            model = lora(model, new.r, new.alpha, new.targets, dropout=new.dropout, seed=seed)
        if wanted.autocast_dtype is not None:  # a classifier's head too, as PEFT keeps adapters
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.data = at_least_float32(parameter.data)
        return model

    def teacher(self) -> nn.Module | None:
        """The frozen model of ``[teacher]``. Raises ``ModelError`` or ``FetchError`` if there is no
        such model, or it has another vocabulary."""
        wanted = self.config.teacher
        if wanted is None:
            return None
        if isinstance(wanted.id, nn.Module):
            teacher = wanted.id.to(self.device)
        else:
            dtype, bits = wanted.dtype, wanted.quantization
            with self.stage(f"loading the teacher: {wanted.id}") as say:
                teacher, theirs = load_model(
                    wanted.id, dtype, self.device, quantization=bits, on_progress=say
                )
            if theirs is not None:
                _check_vocabulary(wanted.id, theirs.get_vocab(), self.tokenizer.get_vocab())
        train_without_cache(teacher)
        return teacher.requires_grad_(False).eval()


def _checkpoint(model: Any) -> None:
    """Activation checkpointing, by its name in whichever transformers is installed; without the
    KV cache, which transformers would switch off with a warning at the first batch."""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)()
    train_without_cache(model)


def _check_vocabulary(name: str, theirs: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Raises where an id means one token to the teacher and another to the model; either may have
    tokens that the other has not."""
    by_id = {number: token for token, number in theirs.items()}
    other = [
        token
        for token, number in own.items()
        if theirs.get(token, number) != number or by_id.get(number, token) != token
    ]
    if other:
        raise ModelError(
            f"teacher.id={name!r}: {len(other)} of the model's {len(own)} tokens, such as "
            f"{other[0]!r}, have other ids there, and distributions are compared id by id; take a "
            "teacher with the model's tokenizer"
        )
