"""A Hugging Face causal LM without weights: parameters on the meta device, buffers for real."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.runtime.engine import EngineError


def optional(package: str) -> Any:
    """Imports a package of the ``demo`` extra.

    Raises:
        EngineError: it is not installed, or too old to be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise EngineError(
            f"shared weights need {package} ({missing}); pip install 'fxrl[demo]'"
        ) from missing


def build_skeleton(
    config: Any,
    checkpoint_dir: Path,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
) -> nn.Module:
    """The model that ``AutoModelForCausalLM.from_pretrained`` would make, before its weights.

    NOTE [Why buffers are made for real]
    Non-persistent buffers (rotary frequencies, position ids) are in no checkpoint: only the
    module's own ``__init__`` knows them. So only parameters go to the meta device, and buffers are
    computed on the CPU, where ``from_pretrained`` computes them: the bits are the same.

    Args:
        config: a ``PretrainedConfig``; ``None`` reads the checkpoint's. It is copied.
        checkpoint_dir: a folder with ``config.json`` and, maybe, ``generation_config.json``.
        dtype: of the parameters.
        attn_implementation: as ``from_pretrained``; ``None`` lets transformers choose.

    Raises:
        EngineError: the folder has no readable configuration, or it makes no causal LM.
    """
    hf, accelerate = optional("transformers"), optional("accelerate")
    where = str(checkpoint_dir)
    try:
        if config is None:
            config = hf.AutoConfig.from_pretrained(where, local_files_only=True)
        config = copy.deepcopy(config)
        config._name_or_path = where  # what PEFT writes into an adapter as its base
        extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            accelerate.init_empty_weights(include_buffers=False),
        ):
            model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)
    except (OSError, ValueError, AssertionError) as error:
        raise EngineError(
            f"{where!r}: transformers {hf.__version__} makes no causal LM of its configuration "
            f"({str(error).splitlines()[0][:200]}); use a decoder-only language model"
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
