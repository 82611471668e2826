"""The engines by name, and what a run gives one to be built of.

NOTE [Why an engine makes the model too]
The embedded engine samples with the trainer's own model, so the model comes first. vLLM owns the
weights: it loads them, the trainer's model is made over its storages, the adapter goes on top, and
then the engine is told whose policy it serves. Which order is right only the engine knows; that an
optimizer may be made only afterwards, since it refers to the parameters, holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from fxrl.engines.engine import Engine, EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a run wants of its engine, and how its model is come by.

    Attributes:
        load: the model with its weights on ``device``, and its tokenizer.
        folder: the same model as a checkpoint's folder, and its tokenizer.
        trainable: puts the adapter on a model and sets it to train.
        longest_prompt: from the tokenizer to the tokens of the longest prompt of the run.
        max_tokens: longest completion.
        device: where the trainer's model is to be.
        dtype: of its weights.
        autocast: dtype that it computes in, where that is another one.
        seed: of the engine's own draws.
        tell: takes a line for the user.
        stage: says what is being done for the time of a ``with``; gives what takes details.
        options: the engine's own, such as ``VllmOptions``; ``None`` where it has none.
    """

    load: Callable[[], tuple[nn.Module, Any]]
    folder: Callable[[], tuple[Path, Any]]
    trainable: Callable[[nn.Module], nn.Module]
    longest_prompt: Callable[[Any], int]
    max_tokens: int
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    seed: int
    tell: Callable[[str], None]
    stage: Callable[[str], AbstractContextManager[Callable[[str], None]]]
    options: Any = None


class Built(NamedTuple):
    """Attributes: model: with its adapter, in train mode. tokenizer: its own. engine: draws."""

    model: nn.Module
    tokenizer: Any
    engine: Engine


Build = Callable[[EngineSpec], Built]


def _torch() -> Build:
    from fxrl.engines.torch.engine import build

    return build


def _vllm() -> Build:
    from fxrl.engines.vllm.engine import build

    return build


ENGINES: Mapping[str, Callable[[], Build]] = MappingProxyType({"torch": _torch, "vllm": _vllm})
"""Thunks: an engine is imported when it is built."""


def build_engine(name: str, spec: EngineSpec) -> Built:
    """Model, tokenizer and engine of a run.

    Raises:
        EngineError: there is no such engine, or it cannot be built; the message has the cure.
        ConfigError: the engine cannot serve a model on ``spec.device``.
    """
    if name not in ENGINES:
        raise EngineError(f"engine={name!r} is unknown; use one of {', '.join(ENGINES)}")
    return ENGINES[name]()(spec)
