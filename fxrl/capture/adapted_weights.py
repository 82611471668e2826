"""PEFT's adapters of whole parameters (``target_parameters``: the experts of a mixture), traced.

    with self._activate_lora(...):           ParamWrapper.forward
        return self.base_layer(x)

PEFT registers a parametrization there, for one call: it makes a class, and takes it away again.
Dynamo ends the graph at both. While a step is traced the wrapper calls a twin of its module: the
same attributes, and of each adapted parameter what the parametrization would compute.

NOTE [Why a twin]: the adapted weight could be put in the parameter's place for the call. Traced
code that writes into modules is no layer like another, and no body of a checkpoint. A twin shares
the module's ``__dict__``, so whatever is switched or moved there is its own; only its class and a
slot differ, which nothing else sees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.capture._torch import never_captured

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # PEFT casts narrower ones


def traceable_forwards(
    model: nn.Module, known: dict[nn.Module, MethodType]
) -> dict[nn.Module, MethodType]:
    """What stands for each wrapper's ``forward`` while a step is called; ``known`` ones stay."""
    return {wrapper: _forward(wrapper, known.get(wrapper)) for wrapper in _wrappers(model)}


def _forward(wrapper: Any, known: MethodType | None) -> MethodType:
    chain = (*_chain(wrapper),)
    if known is not None and getattr(known.__self__, "wrappers", ()) == chain:
        return known
    return MethodType(_traceable, _twin(chain))


def _wrappers(model: nn.Module) -> Iterator[Any]:
    """The adapter layers whose module may have a twin."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")  # where it is not loaded, none is adapted
    kind: Any = getattr(lora, "ParamWrapper", ())
    for part in model.modules():
        if isinstance(part, kind) and type(part).forward is kind.forward:
            chain = [*_chain(part)]
            base: Any = chain[-1].base_layer
            hooked = any(one._forward_hooks or one._forward_pre_hooks for one in chain[1:])
            if not hooked and _can_be_shared(base) and all(map(_is_plain, chain)):
                yield part


def _chain(wrapper: Any) -> Iterator[Any]:
    """A wrapper, and those inside of it: one for each parameter of their module."""
    yield wrapper
    if isinstance(wrapper.base_layer, type(wrapper)):
        yield from _chain(wrapper.base_layer)


def _is_plain(wrapper: Any) -> bool:
    own = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
    return own is not None and own.dtype in _FLOATS


def _can_be_shared(base: nn.Module) -> bool:
    """Whether nothing in its ``__dict__`` is bound to it, such as a forward that others put there:
    it would read the parameters as they are."""
    bound = (getattr(value, "__self__", None) for value in vars(base).values())
    return not hasattr(base, "base_layer") and all(owner is not base for owner in bound)


def _twin(chain: tuple[Any, ...]) -> nn.Module:
    base: nn.Module = chain[-1].base_layer
    kind = _twin_class(type(base), tuple(w.parameter_name for w in chain))  # type: ignore[arg-type]
    twin: Any = object.__new__(kind)
    twin.__dict__ = base.__dict__
    object.__setattr__(twin, "wrappers", chain)
    return twin  # type: ignore[no-any-return]


@cache
def _twin_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    weights = {name: property(partial(_weight, index)) for index, name in enumerate(names)}
    return type(kind.__name__, (kind,), {"__slots__": ("wrappers",), **weights})


def _weight(index: int, twin: Any) -> Tensor:
    """An adapted parameter, as PEFT's parametrization computes it."""
    wrapper = twin.wrappers[index]
    own: Tensor = twin._parameters[wrapper.parameter_name]
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.disable_adapters or wrapper.merged or not names:
        return own
    if len(names) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):
        left, right, scaling = wrapper.get_delta_factors(names[0])
        with torch.autocast(own.device.type, enabled=False):
            return torch.baddbmm(own, left, right, alpha=scaling)
    first, *others = (wrapper.get_delta_weight(name) for name in names)
    return own + sum(others, first)  # type: ignore[no-any-return]


class _Whole:
    """Inside, no graph ends: what cannot be traced to its end runs as PEFT does it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _traceable(twin: Any, *args: Any, **kwargs: Any) -> Any:
    wrapper = twin.wrappers[0]
    if not torch.compiler.is_compiling():
        return _as_written(wrapper, *args, **kwargs)
    if wrapper.merged or kwargs.get("adapter_names") is not None:
        return type(wrapper).forward(wrapper, *args, **kwargs)
    with _Whole():
        return twin(*args, **kwargs)


@never_captured("PEFT makes and unmakes a class for each call")
def _as_written(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return type(wrapper).forward(wrapper, *args, **kwargs)
