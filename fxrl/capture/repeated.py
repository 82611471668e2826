"""Repeated layers, captured once: a layer that equals an earlier one is one call of its graph.

    for layer in self.layers:               the model, as written
        x = layer(x, mask)

    %b = begins(0, %x, %mask)               what Dynamo traces: of the first layer all its calls,
    ...                                     between two marks; of the others one call each
    %x1 = ends(0, %b, %h)
    %x2 = again(1, %x1, %mask)

``fxrl.capture.shared_bodies`` makes one body of it that each layer calls, so that neither tracing
nor lowering grows with depth. A layer is told equal before the trace by all that its modules hold
(``LayerContents``), watched at every call of the step, and held to the traced layer afterwards:
equal arguments, nothing written by traced code, no value that leaves the layer in another way than
as its result. Whatever fails, the step captures every layer as it is written.

NOTE [Why not torch.compiler.nested_compile_region]: torch 2.11 traces each layer again inside of
it, 2.13 checks guards for each (0.2 s a layer with LoRA); both take tensors for arguments, and a
language model hands its layers a KV cache.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxrl.capture._torch import (
    OptimizedModule,
    in_graph,
    is_never_captured,
    looked_up_by,
    tensors_in,
    uncollected,
    written_by_trace,
)
from fxrl.capture.layer_contents import LayerContents
from fxrl.capture.opaque import autocasts
from fxrl.capture.recorded import recorded, recorder_of_outputs
from fxrl.ir.graph import memory_like
from fxrl.ir.remark import Refusal

_COUNTED = re.compile(r"(\w*?)\d+")


class Layer:
    """One layer of a group, and what its ``forward`` is while it is traced."""

    def __init__(self, module: nn.Module, path: str, index: int, contents: LayerContents) -> None:
        self.module, self.path, self.index, self.contents = module, path, index, contents
        self.first: Layer = self
        self._bind: Callable[[Any], None] = lambda _: None  # the forward that is called eagerly
        self.result: Any = None  # of the first layer's last call, while tracing
        self.modes: Any = None
        self.written: dict[int, Any] = {}
        self.fed: list[bool] = []  # which of its arguments' tensors were traced with a gradient
        self.begun = 0  # how many of ``_READ`` there were
        self.token = next(_TOKENS)
        _LAYERS[self.token] = self

    def is_as(self, its: Layer) -> bool:
        """Whether what was traced of this layer holds for ``its``: itself, looked at again, or one
        in its place.

        NOTE [Why a copy may hold other objects]: such as a config of its own. What is read of the
        first layer of a kind is guarded by Dynamo; the others hold the same objects as that one.
        """
        mine, now = self.contents, its.contents
        like = mine.is_like(now) if self.module is its.module else mine.facts == now.facts
        around = [*map(id, mine.hooks)] == [*map(id, now.hooks)]
        return like and around and (self.path, mine.numbers) == (its.path, now.numbers)

    def become(self, its: Layer | None) -> None:
        """Stand for another module from here on; for none, so that what it held can go."""
        if its is None:
            self.contents.forget()
            self.module = nn.Module()
        else:
            self.module, self.contents = its.module, its.contents
        self.__dict__.pop("_places", None)
        self._bind(self.module.forward)

    @property
    def trains(self) -> bool:
        """Whether it has weights that are trained."""
        return any(tensor.requires_grad for tensor in self.contents.tensors)

    def is_told_by(self, read: tuple[Any, ...]) -> bool:
        """Whether ``has_read`` tells traced code this layer from equal ones."""
        own = [id(one) in self.contents.held for one in read]
        if len(own) == 1:  # a module that has the layer inside of it knows its place
            return not own[0] and self.module in read[0].modules()
        return any(own) and (read[0] is read[1] or not all(own))

    def may_hold(self, part: Any) -> bool:
        """Whether something is a part of the layer, or nobody knows what it is (None)."""
        return part is None or id(part) in self.contents.held

    def place_of(self, tensor: Any) -> int | None:
        """Which of the layer's tensors it is; equal layers have theirs in the same order."""
        return self._places.get(id(tensor))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(tensor): place for place, tensor in enumerate(self.contents.tensors)}

    @cached_property
    def names(self) -> list[str]:
        """What the layer's modules call its tensors, and those of equal ones."""
        held = (
            (f"{path}.{name}".lstrip("."), value)
            for path, part in self.module.named_modules()
            for table in (vars(part), part._parameters, part._buffers)
            for name, value in table.items()
        )
        known = {id(value): name for name, value in held if isinstance(value, Tensor)}
        return [known.get(id(x), f"tensor_{i}") for i, x in enumerate(self.contents.tensors)]

    def traced(self) -> Callable[..., Any]:
        """The forward that Dynamo sees.

        NOTE [Why an empty cache goes in]: a language model gives its layers a KV cache to fill,
        which changes its masks and which no loss reads. While a layer's place in it is empty, what
        the layer gets back is what it puts in; so that is what it gets, and nothing is kept.
        ``_UNKEPT`` stands in its place: code that reads the cache fails to be captured this way.

        NOTE [Why a first layer is fed]: what it was given it may also find by itself, such as the
        embeddings that a model keeps for all its layers. Other layers are given other values and
        find the same one, so what it is given is told from all else by a name of its own.

        NOTE [Why one that trains is fed a gradient]: the one that a model begins with is given none
        where embeddings are frozen, and the others are, by what it trains. Of an
        ``autograd.Function`` whose arguments have no gradient Dynamo traces the forward alone,
        which the others would differentiate.

        NOTE [Why checkpointing goes inside]: up to 5.17, transformers checkpoints a layer around
        its forward, later inside of it. Inside, it is a part of what equal layers share; around
        it, each layer's checkpointing is traced and lowered anew: 45 ms a layer.
        """
        index, kind = self.index, kind_of_cache()
        original: Any = self.module.forward
        trace = partial(_trace_again, self.token)
        if self.first is self:
            trace = partial(_trace_first, self.token, self.trains)
        recorder = recorder_of_outputs() if self.contents.hooked else None
        call = partial(_trace_recorded, self.token, recorder, trace)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return original(*args, **kwargs)
            caches = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
            if not all([_is_empty(cache, index) for cache in caches]):
                return original(*args, **kwargs)
            for cache in caches:
                cache.layers[index] = _UNKEPT

            def stand_in(empty: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
                rest = [empty if isinstance(value, kind) else value for value in args]
                named = {k: empty if isinstance(kwargs[k], kind) else kwargs[k] for k in kwargs}
                return tuple(rest), named

            return call(_as_given, original, stand_in(_EMPTY), stand_in(True))

        def under_checkpoint(inner: Any) -> Any:
            checkpoint = original.__self__._gradient_checkpointing_func
            return lambda *args, **kwargs: checkpoint(partial(inner, **kwargs), *args)

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return call(under_checkpoint, original, (args, kwargs), (args, kwargs))

        def bind(another: Any) -> None:
            nonlocal original
            original = another

        self._bind = bind
        # An attribute, so that Dynamo has a way to it from the layer. What is no method does not
        # say whose it is.
        if isinstance(original, types.MethodType):
            forward.checkpointed = checkpointed  # type: ignore[attr-defined]
        _BY_FORWARD[forward] = self
        return forward


def marked(module: nn.Module) -> Layer | None:
    """The layer that a module is to the trace, if it has no hooks: calling it is its forward. The
    call of one that is not its own ``first`` is ``again`` of its arguments and nothing else, unless
    one of these is a cache (``kind_of_cache``)."""
    forward = module.__dict__.get("forward")
    layer = None if forward is None else _BY_FORWARD.get(forward)
    if layer is None or any(getattr(module, name) for name in _RUN_BY_CALLS):
        return None
    return layer


_RUN_BY_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BY_FORWARD: WeakKeyDictionary[Any, Layer] = WeakKeyDictionary()
_TOKENS = itertools.count()
_LAYERS: WeakValueDictionary[int, Layer] = WeakValueDictionary()


_READ: list[tuple[Any, ...]] = []


def has_read(*parts: Any) -> None:
    """Told by the trace: an attribute is read of a module; two modules are compared; a module or a
    tensor is found again by another way, in what is given with it (none: a global)."""
    _READ.append(parts)


def layer_of(token: int) -> Layer:
    """The layer whose marks have this token."""
    return _LAYERS[token]


class _EmptyCache:
    """A layer's place in a KV cache that holds nothing yet."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        return keys

    def update_conv_state(
        self, states: Tensor, *_: Any, conv_kernel_size: int, **__: Any
    ) -> Tensor:
        """What a convolution reads: at least as much as its kernel does, with nothing ahead."""
        missing = conv_kernel_size - states.shape[-1]
        return nn.functional.pad(states, (missing, 0)) if missing > 0 else states

    def update_recurrent_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False


class _Unkept:
    """What is left where a cache was not filled."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: a training step of fxrl keeps no KV cache")


_EMPTY, _UNKEPT = _EmptyCache(), _Unkept()
#: Of transformers: what grows by what comes, what holds a state, what holds nothing.
_DYNAMIC = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
_STATES = ("is_conv_states_initialized", "is_recurrent_states_initialized")


def kind_of_cache() -> Any:
    """What ``isinstance`` knows a cache of transformers by: layers take it by several names."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", _Unkept)


def _is_empty(cache: Any, index: int) -> bool:
    layers = getattr(cache, "layers", ())
    if index >= len(layers):
        return False
    layer = layers[index]
    if type(layer).__name__ == "DummyLayer":
        return True
    if type(layer).__name__ not in _DYNAMIC or getattr(layer, "record_past", False):
        return False
    filled = [flag for name in _STATES for flag in getattr(layer, name, {}).values()]
    return not any(filled) and not getattr(layer, "is_initialized", False)


def _trace_recorded(
    token: int,
    recorder: Any,
    trace: Callable[..., Any],
    wrap: Callable[[Any], Any],
    original: Any,
    given: Any,
    told: Any,
) -> Any:
    def run(function: Any, names: tuple[str, ...]) -> Any:
        args, kwargs = told
        also = {"recorded": names} if names else {}
        found = trace(wrap(function), given, (args, {**kwargs, **also}))
        if "hidden_states" in names and found[1 + names.index("hidden_states")]:
            counts_hidden_states(token)
        return found

    return recorded(recorder, run, original)


@in_graph
def counts_hidden_states(token: int) -> Tensor:
    """A part's hook has recorded hidden states, which goes by how many there are already."""
    raise Refusal(f"{_LAYERS[token].path} records hidden states of its parts")


def _trace_first(token: int, trains: bool, original: Any, given: Any, told: Any) -> Any:
    begin = begins(token, *told)
    args, kwargs = given
    known: list[tuple[Any, Any]] = []
    fed = {name: _fed(value, known, trains) for name, value in kwargs.items()}
    return ends(token, begin, original(*[_fed(value, known, trains) for value in args], **fed))


def _as_given(value: Any) -> Any:
    return value


def _fed(value: Any, known: list[tuple[Any, Any]], trains: bool) -> Any:
    """What stands for an argument, or a part of one, while a first layer is traced."""
    if type(value) is tuple:
        return tuple([_fed(part, known, False) for part in value])
    if type(value) is not Tensor:
        return value
    for one, its in known:
        if one is value:  # which the layer may ask of two
            return its
    known.append((value, feeds(value, trains and _is_starved(value))))
    return known[-1][1]


def _is_starved(value: Tensor) -> bool:
    return torch.is_grad_enabled() and value.is_floating_point() and not value.requires_grad


def _trace_again(token: int, original: Any, given: Any, told: Any) -> Any:
    return again(token, *told)


@in_graph
def begins(token: int, args: Any, kwargs: Any) -> Tensor:
    """Here the calls of a first layer begin; the arguments are what they were given."""
    layer = _LAYERS[token]
    layer.written, layer.modes, layer.begun = _written(), _modes(), len(_READ)
    top = {id(value) for value in (*args, *kwargs.values())} if layer.trains else set()
    layer.fed = [
        leaf.requires_grad or (id(leaf) in top and _is_starved(leaf))
        for leaf in tensors_in((args, kwargs))
    ]
    return torch.zeros(())


@in_graph
def feeds(value: Tensor, starved: bool) -> Tensor:
    """An argument of a first layer; of one that is starved as it is where it has a gradient."""
    return torch.clone(memory_like(value).requires_grad_(starved or value.requires_grad))


@in_graph
def ends(token: int, begin: Tensor, result: Any) -> Any:
    """Here they end, with their result."""
    layer = _LAYERS[token]
    if _written() != layer.written:
        raise Refusal(f"{layer.path} writes into Python objects")
    if looked_up_by(layer.contents.held):
        raise Refusal(f"{layer.path}, or a part of it, is what something is looked up by")
    for read in {(*map(id, parts),): parts for parts in _READ[layer.begun :]}.values():
        if layer.is_told_by(read):
            raise Refusal(f"{layer.path} reads a {type(read[-1]).__name__} that tells layers apart")
    layer.result = result
    return pytree.tree_map_only(Tensor, torch.clone, result)


@in_graph
def again(token: int, args: Any, kwargs: Any) -> Any:
    """An equal layer's call, with other arguments; gives what looks like the first one's result."""
    layer = _LAYERS[token]
    first = layer.first
    if first.result is None:
        raise Refusal(f"{layer.path} runs before {first.path}")
    if first.modes != _modes():
        raise Refusal(f"{layer.path} runs under other modes than {first.path}")
    written = _written()
    if layer.contents.places(written) != first.contents.places(first.written):
        raise Refusal(f"the step writes into {layer.path} otherwise than into {first.path}")
    if _apart(written) != _apart(first.written):
        raise Refusal(f"the step writes into Python objects between {first.path} and {layer.path}")
    fed = [leaf.requires_grad for leaf in tensors_in((args, kwargs))]
    if any(now and not then for now, then in zip(fed, first.fed, strict=False)):
        raise Refusal(f"{layer.path} is given a gradient inside of an argument, {first.path} none")

    def like(value: Tensor) -> Tensor:
        # Weights of its own may be read by nobody, such as those of an adapter that is off.
        live = torch.is_grad_enabled() and (any(fed) or (layer.trains and value.requires_grad))
        return memory_like(value).requires_grad_(live and value.is_floating_point())

    return pytree.tree_map_only(Tensor, like, first.result)


def _written() -> dict[int, Any]:
    return written_by_trace(recorder_of_outputs(), _is_inside)


def _apart(written: dict[int, Any]) -> dict[int, Any]:
    """What is written into objects that no layer holds, such as ``context.layer = i``."""
    return {key: what for key, what in written.items() if not _is_inside(key)}


def _is_inside(key: int) -> bool:
    """Whether a layer holds the object of this id."""
    return any(key in layer.contents.held for layer in _LAYERS.values())


def _modes() -> tuple[Any, ...]:
    """What PyTorch does differently from code that is the same."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocasts()


class RepeatedLayers:
    """The groups of equal layers of a model, and of others that its loss holds, for a step.

    NOTE [Why what it was is remembered]: an adapter that is switched off for the reference model
    and on again, or ``eval`` and ``train``, comes back to a model that was captured. Each state of
    the layers has its own captures, so that none is stale, and keeps them.

    NOTE [Why captures look weights up]: a reference may be a new copy every few steps, or have an
    average's weights. A state takes over such a copy if its layers are alike, with the captures,
    which ask its layers for their weights at every call. So nothing holds on to the old copy.
    """

    def __init__(self, model: nn.Module, held: Callable[[], dict[str, nn.Module]] = dict) -> None:
        self._model, self._held = model, held
        self._known: list[_State] = []
        self._state = _State(0, _View({}))

    def __bool__(self) -> bool:
        return bool(self._state.layers)

    @property
    def generation(self) -> int:
        """Which state the layers are in: a number for each that they have been in."""
        return self._state.generation

    @property
    def apart(self) -> list[str]:
        """What there is to say of layers that have no equal."""
        return self._state.apart

    def refresh(self) -> None:
        """Look at the models, and again if they are not what they were."""
        models = {"": self._model, **self._held()}
        if not self._known or not self._state.holds(models):
            known = next((state for state in self._known if state.holds(models)), None)
            # 36 layers take 0.09 s, and 0.37 if garbage is collected meanwhile.
            with uncollected():
                self._state = known or self._look(models)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """The layers' forwards are those that Dynamo shall see."""
        layers, forwards = self._state.layers, self._state.forwards
        before = [layer.module.__dict__.get("forward") for layer in layers]
        for layer, forward in zip(layers, forwards, strict=True):
            layer.module.__dict__["forward"] = forward
        try:
            yield
        finally:
            _READ.clear()
            for layer, own in zip(layers, before, strict=True):
                layer.result = None
                if own is None:
                    del layer.module.__dict__["forward"]
                else:
                    layer.module.__dict__["forward"] = own

    def _look(self, models: dict[str, nn.Module]) -> _State:
        """The state that the models are in: one that is known by other objects, or a new one."""
        view = _View(models)
        found = next((state for state in self._known if state.takes_over(view)), None)
        if found is None:
            found = _State(len(self._known) + 1, view)
            self._known.append(found)
        for state in self._known:
            state.keep_only(view.reached)
        return found


class _View:
    """The groups of equal layers of all models, as they were looked at once.

    Attributes:
        layers: members of the groups.
        apart: what there is to say of lists with layers of one class that have no equal.
        reached: ids of all modules, and of their tensors, which are alive as long as this is.
        ties: which of the tensors are one.
    """

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self._models = [*models.values()]
        owners: dict[nn.Module, list[str]] = {}
        for title, model in models.items():
            for module in model.modules():
                owners.setdefault(module, []).append(title)
        self.layers: list[Layer] = []
        self.apart: list[str] = []
        outside = self._look(models, owners)
        self._watched = [module._modules.values() for module in outside]
        self._sizes = [*map(len, self._watched)]
        self._values = [*itertools.chain.from_iterable(self._watched)]
        self._tensors = [t for layer in self.layers for t in layer.contents.tensors]
        for module in outside:
            own = (*module._parameters.values(), *module._buffers.values())
            self._tensors += [tensor for tensor in own if tensor is not None]
        first: dict[int, int] = {}
        self.ties = [first.setdefault(id(t), place) for place, t in enumerate(self._tensors)]
        self.reached = frozenset((*map(id, owners), *first))

    def _look(
        self, models: dict[str, nn.Module], owners: dict[nn.Module, list[str]]
    ) -> list[nn.Module]:
        """Find the layers; gives the modules that are in none."""
        outside: list[nn.Module] = []
        inside: set[nn.Module] = set()
        seen: set[nn.Module] = set()
        for title, model in models.items():
            for name, module in model.named_modules(seen, title):
                if module in inside:
                    continue
                outside.append(module)
                for members in _counted(module):
                    own = {key: member for key, member in members.items() if member not in inside}
                    group, apart = _groups(name, own, owners)
                    self.apart += apart
                    inside.update(part for layer in group for part in layer.module.modules())
                    self.layers += group
        return outside

    def holds(self, models: dict[str, nn.Module]) -> bool:
        """Whether these are the models, and have the same modules in the same states."""
        now = itertools.chain.from_iterable(self._watched)
        return (
            [*map(id, models.values())] == [*map(id, self._models)]
            and [*map(len, self._watched)] == self._sizes
            and all(map(operator.is_, now, self._values))
            and all(layer.contents.holds() for layer in self.layers)
        )


class _State:
    """The groups of equal layers while the models are in one state."""

    def __init__(self, generation: int, view: _View) -> None:
        self.generation, self.layers, self.apart = generation, view.layers, view.apart
        self.forwards = [layer.traced() for layer in view.layers]
        self._view: _View | None = view
        self._ties = view.ties

    def holds(self, models: dict[str, nn.Module]) -> bool:
        """Whether the models are in it."""
        return self._view is not None and self._view.holds(models)

    def takes_over(self, view: _View) -> bool:
        """Whether what was looked at anew is in this state, which then watches it.

        It holds other objects than before, such as the list of names that ``set_adapter`` of PEFT
        leaves, or is another copy of a model.
        """
        alike = len(view.layers) == len(self.layers) and self._ties == view.ties
        place = {layer: i for i, layer in enumerate((*self.layers, *view.layers))}
        if not alike or not all(
            layer.is_as(its) and place[its.first] - place[layer.first] == len(self.layers)
            for layer, its in zip(self.layers, view.layers, strict=True)
        ):
            return False
        for layer, its in zip(self.layers, view.layers, strict=True):
            layer.become(its)
        view.layers, self._view = self.layers, view
        return True

    def keep_only(self, reached: frozenset[int]) -> None:
        """Let go of models, of which a part is out of reach: no other state keeps it alive."""
        if self._view is not None and not self._view.reached <= reached:
            self._view = None
            for layer in self.layers:
                layer.become(None)


def _counted(module: nn.Module) -> list[dict[str, nn.Module]]:
    """Its children that a number counts, by name: ``0, 1`` of a list, ``h0, h1`` of any module."""
    by_stem: dict[str, dict[str, nn.Module]] = {}
    for name, child in module._modules.items():
        if child is not None and (match := _COUNTED.fullmatch(name)) is not None:
            by_stem.setdefault(match[1], {})[name] = _compiled(child)
    return list(by_stem.values())


def _compiled(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, which is what a trace calls."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def _groups(
    name: str, members: dict[str, nn.Module], owners: dict[nn.Module, list[str]]
) -> tuple[list[Layer], list[str]]:
    """The layers of one list that have an equal one in the same models (``owners``: a reference may
    share some with the policy, and run them first); each knows the first of its kind. And what
    there is to say of the others."""
    places = list(members.values())
    layers = [
        Layer(module, f"{name}.{number}".lstrip("."), index, LayerContents(module))
        for index, (number, module) in enumerate(members.items())
        if module._modules
        and places.count(module) == 1  # one at two places is its own equal
        and not is_never_captured(module)
    ]
    firsts: list[Layer] = []
    for layer in layers:
        for first in firsts:
            shared_alike = owners[first.module] == owners[layer.module]
            if shared_alike and first.contents.equals(layer.contents, layer.index - first.index):
                layer.first = first
                break
        else:
            firsts.append(layer)
    met = {id(layer.first) for layer in layers if layer.first is not layer}
    equal = [layer for layer in layers if layer.first is not layer or id(layer) in met]
    return equal, [*_apart_from(firsts, [one for one in firsts if id(one) not in met])]


def _apart_from(firsts: list[Layer], alone: list[Layer]) -> Iterator[str]:
    """One sentence, or none: of a class of which there is no other, there is nothing to say."""
    kin = [next(f for f in firsts if type(f.module) is type(one.module)) for one in alone]
    pairs = [(one, its) for one, its in zip(alone, kin, strict=True) if one is not its]
    if pairs:
        (one, its), *more = pairs
        what = its.contents.difference(one.contents) or "where else it is held"
        who = f"{one.path} and {len(more)} more are" if more else f"{one.path} is"
        yield (
            f"{who} captured alone, which takes longer: {one.path} differs from {its.path} in "
            f"{what}"
        )
