"""PEFT's ``disable_adapter`` inside of a loss: the reference is the policy without its adapter.

    with torch.no_grad(), model.disable_adapter():
        reference = model(...)

PEFT walks over all modules there: it counts parameters for a warning, and tells weights that
nobody reads then that they need no gradient. Dynamo ends the graph at both, and inside of a block
it cannot go on behind the break, so all of the loss would run as written. While a step is traced
the block sets what forwards read, an attribute of each adapter layer, and nothing else.

NOTE [Why the reference multiplies by its adapter, too]: an adapter of zeros must give the bits of
none, so that DPO begins with ln 2 and a KL with 0. A forward without its products is another graph:
products are merged otherwise, kernels fused otherwise, and in bf16 each rounding that falls
otherwise grows with depth (12 layers of Qwen3-8B's shape: a first loss of 0.687). So LoRA, where
its output is added, keeps its ops and is scaled by 0, which costs its narrow products. So is an
adapter that was switched off around the call of a step.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.capture._torch import around_compiles
from fxrl.capture.adapted_weights import traceable_forwards


class AdapterBlocks:
    """What stands for ``PeftModel.disable_adapter`` while a step over ``model`` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks: dict[Any, _Block] = {}
        self._forwards: dict[nn.Module, MethodType] = {}
        self._contexts: dict[nn.Module, MethodType] = {}
        self._looked = False

    @contextmanager
    def traceable(self) -> Iterator[None]:
        """With the method replaced, of each ``PeftModel`` whose own would come to the same.

        NOTE [Why models are looked at only before a trace]: they have some two hundred adapter
        layers. What was traced of their flags and weights, Dynamo's guards hold at every call.
        """
        if not self._looked:
            self._look()
        try:
            with ExitStack() as inside:
                silent = [inside.enter_context(block.silent()) for block in self._blocks.values()]
                if not any(silent):  # else flags are not as PEFT has left them
                    inside.enter_context(around_compiles(self._look))
                self._put()
                yield
        finally:
            self._take_away()

    def _look(self) -> None:
        self._take_away()
        peft: Any = sys.modules.get("peft")  # where it is not loaded, nothing is adapted
        models = [] if peft is None else self._model.modules()
        found = {m: _layers_of(peft, m) for m in models if isinstance(m, peft.PeftModel)}
        known, self._blocks, self._looked = self._blocks, {}, True
        for model, layers in found.items():
            if layers:
                block = self._blocks[model] = known.get(model) or _Block(model)
                block.hold(layers)
        self._forwards = traceable_forwards(self._model, self._forwards)
        had = self._contexts
        plain = [model for model in found if _hooks_by_name(peft, model)]
        self._contexts = {m: had.get(m) or MethodType(_context, m) for m in plain}
        self._put()

    def _methods(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """What stands where, and under which name."""
        yield from ((model, _METHOD, block.method) for model, block in self._blocks.items())
        yield from ((wrapper, "forward", own) for wrapper, own in self._forwards.items())
        yield from ((model, _HOOKS, own) for model, own in self._contexts.items())

    def _put(self) -> None:
        for module, name, method in self._methods():
            module.__dict__.setdefault(name, method)

    def _take_away(self) -> None:
        for module, name, method in self._methods():
            if module.__dict__.get(name) is method:
                del module.__dict__[name]


_METHOD, _OFF = "disable_adapter", "_disable_adapters"
_HOOKS = "_enable_peft_forward_hooks"


def _hooks_by_name(peft: Any, model: Any) -> bool:
    """Whether the context around its forwards does nothing but for calls that name adapters."""
    own = getattr(type(model.base_model), _HOOKS, None)
    return own in (None, getattr(peft.LoraModel, _HOOKS, None))


def _context(model: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's context around a forward: a generator, inside of which no graph can end.

    So a break anywhere in the model would leave all of the loss to eager code.
    """
    named = kwargs.get("adapter_names") is not None or kwargs.get("alora_offsets") is not None
    if named or not torch.compiler.is_compiling():
        return getattr(type(model), _HOOKS)(model, *args, **kwargs)
    return nullcontext()


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


def _is_plain_lora(layer: Any) -> bool:
    """Whether it adds ``scaling`` times its adapters' output, and draws no random numbers."""
    lora: Any = sys.modules["peft"].tuners.lora.layer
    if type(layer).forward not in (lora.Linear.forward, lora.Embedding.forward) or layer.merged:
        return False
    draws = layer.training and any(getattr(d, "p", 0) for d in layer.lora_dropout.values())
    return not (layer.lora_variant or draws)


class _Block:
    """The adapter layers of a model, and its method that switches them off.

    Attributes:
        layers: all of them by their paths, which sites are named by; their flags are equal.
        scales: their ``scaling`` while they are silent: 0 for each adapter, the integer, which
            Dynamo never makes a variable of; none where they would not be silent by it.
        method: PEFT's own but in traced code.
    """

    def __init__(self, model: Any) -> None:
        self.layers: dict[str, Any] = {}
        self.scales: dict[str, int] = {}
        layers, scales, original = self.layers, self.scales, model.disable_adapter

        def method() -> Any:
            if not torch.compiler.is_compiling():
                return original()
            return _Set(layers, "scaling", scales) if scales else _Set(layers, _OFF, True)

        self.method: Callable[[], Any] = method

    def hold(self, layers: dict[str, Any]) -> None:
        """Takes these for the model's."""
        self.layers.clear()
        self.layers.update(layers)
        self._rescale()

    def _rescale(self) -> None:
        layers = [*self.layers.values()]
        plain = all(map(_is_plain_lora, layers))
        names = {name for layer in layers for name in layer.scaling} if plain else set()
        if names != self.scales.keys():
            self.scales.clear()
            self.scales.update(dict.fromkeys(sorted(names), 0))

    @contextmanager
    def silent(self) -> Iterator[bool]:
        """Layers that are off now are on, and scaled by 0; whether there are any."""
        off = next(iter(self.layers.values()))._disable_adapters
        if off:
            self._rescale()
        if not off or not self.scales:
            yield False
            return
        with _Set(self.layers, _OFF, False), _Set(self.layers, "scaling", self.scales):
            yield True


class _Set:
    """Inside, an attribute of each layer has this value."""

    def __init__(self, layers: dict[str, Any], name: str, value: Any) -> None:
        self.layers, self.name, self.value = [*layers.values()], name, value

    def __enter__(self) -> None:
        self.before = [getattr(layer, self.name) for layer in self.layers]
        self.put([self.value] * len(self.layers))

    def __exit__(self, *_: object) -> None:
        self.put(self.before)

    def put(self, values: list[Any]) -> None:
        for layer, value in zip(self.layers, values, strict=True):
            object.__setattr__(layer, self.name, value)  # nn.Module's own takes 4 ms
