"""PEFT's ``disable_adapter`` inside of a loss: the reference is the policy without its adapter.

    with torch.no_grad(), model.disable_adapter():
        reference = model(...)

PEFT walks over all modules there: it counts parameters for a warning, and tells weights that
nobody reads then that they need no gradient. Dynamo ends the graph at both, and inside of a block
it cannot go on behind the break, so all of the loss would run as written. While a step is traced
the block sets what forwards read, the flag of each adapter layer, and nothing else.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.capture._torch import around_compiles


class AdapterBlocks:
    """What stands for ``PeftModel.disable_adapter`` while a step over ``model`` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks: dict[Any, _Block] = {}

    @contextmanager
    def traceable(self) -> Iterator[None]:
        """With the method replaced, of each ``PeftModel`` whose own would come to the same.

        NOTE [Why models are looked at only before a trace]: they have some two hundred adapter
        layers. What was traced of their flags and weights, Dynamo's guards hold at every call.
        """
        self._put()
        try:
            with around_compiles(self._look):
                yield
        finally:
            self._take_away()

    def _look(self) -> None:
        self._take_away()
        peft: Any = sys.modules.get("peft")  # where it is not loaded, nothing is adapted
        models = [] if peft is None else self._model.modules()
        found = {m: _layers_of(peft, m) for m in models if isinstance(m, peft.PeftModel)}
        known, self._blocks = self._blocks, {}
        for model, layers in found.items():
            if layers:
                block = self._blocks[model] = known.get(model) or _Block(model)
                block.layers.clear()
                block.layers.update(layers)
        self._put()

    def _put(self) -> None:
        for model, block in self._blocks.items():
            model.__dict__.setdefault(_METHOD, block.method)

    def _take_away(self) -> None:
        for model, block in self._blocks.items():
            if model.__dict__.get(_METHOD) is block.method:
                del model.__dict__[_METHOD]


_METHOD = "disable_adapter"


def _layers_of(peft: Any, model: Any) -> dict[str, Any]:
    """Its adapter layers by their paths; none where PEFT's block changes more than flags."""
    tuners, others = peft.tuners.tuners_utils, peft.utils.other
    if not isinstance(model.base_model, tuners.BaseTuner) or _METHOD in model.__dict__:
        return {}  # prompts have no layers; a method of somebody else's is not PEFT's
    kinds = tuners.BaseTunerLayer, others.AuxiliaryTrainingWrapper
    found = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
    layers: list[Any] = [*found.values()]
    known = tuners.__name__, others.__name__
    as_known = all(type(one).enable_adapters.__module__ in known for one in layers)
    alike = len({layer._disable_adapters for layer in layers}) == 1
    if not (as_known and alike and all(map(_is_settled, layers))):
        return {}
    for layer in layers:
        layer.__dict__.setdefault("_disable_adapters", False)  # else the trace would add it
    return found


def _is_settled(layer: Any) -> bool:
    """Whether its weights need gradients as PEFT leaves them behind a block."""
    active = () if layer._disable_adapters else layer.active_adapters
    frozen = getattr(layer, "frozen_peft_weight_names", {})
    return all(
        weight.requires_grad is (key in active and name not in frozen.get(key, ()))
        for name in layer.adapter_layer_names
        for key, part in operator.attrgetter(name)(layer).items()
        for weight in ((part,) if isinstance(part, Tensor) else part.parameters())
    )


class _Block:
    """The adapter layers of a model, and its method that switches them off.

    Attributes:
        layers: all of them by their paths, which sites are named by; their flags are equal.
        method: PEFT's own but in traced code.
    """

    def __init__(self, model: Any) -> None:
        self.layers: dict[str, Any] = {}
        layers, original = self.layers, model.disable_adapter

        def method() -> Any:
            return _Disabled(layers) if torch.compiler.is_compiling() else original()

        self.method: Callable[[], Any] = method


class _Disabled:
    """The block as it is traced."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layers = [*layers.values()]

    def __enter__(self) -> None:
        self.before = self.layers[0]._disable_adapters
        self.switch(True)

    def __exit__(self, *_: object) -> None:
        self.switch(self.before)

    def switch(self, off: bool) -> None:
        for layer in self.layers:
            object.__setattr__(layer, "_disable_adapters", off)  # nn.Module's own takes 4 ms
