"""What code leaves elsewhere than in its result, as a part of what the code around it gives.

    model(ids, output_attentions=True, output_router_logits=True)
    checkpoint(layer, hidden, shared)            # shared["keys"] = ...

A model of transformers makes a list for each such output, and hooks inside of its layers append to
it. Layers may be handed a mapping, such as of keys and values, that some fill for others. What
equal layers share, and what is checkpointed, gives tensors and changes nothing outside; so it runs
with lists and mappings of its own, and what has been put into them is given with its result.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fxrl.capture._torch import graph_break


def recorder_of_outputs() -> Any:
    """What the hooks ask for the lists, by their names; None without transformers."""
    found = sys.modules.get("transformers.utils.output_capturing")
    return getattr(found, "_active_collector", None)


def recorded(recorder: Any, run: Callable[..., Any], function: Any) -> Any:
    """What ``run(function, names)`` gives, which returns what the function does; names are those
    of the lists that are given with it, behind its result."""
    lists = (recorder and recorder.get()) or {}
    names = tuple([name for name, held in lists.items() if isinstance(held, list)])
    if not names:
        return run(function, names)
    result, *found = run(partial(with_own_lists, recorder, names, function), names)
    for name, values in zip(names, found, strict=True):
        lists[name].extend(values)
    return result


def checkpoint_recorded(recorder: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint(function, *args, **kwargs)``. What hooks record inside of a reentrant one has no
    gradient: only what the function returns is differentiated."""

    def run(function: Any, names: tuple[str, ...]) -> Any:
        if not names:
            return checkpoint(function, *args, **kwargs)
        result, *lists = checkpoint(function, *args, **kwargs)
        if kwargs.get("use_reentrant", True):
            lists = [tuple([value.detach() for value in values]) for values in lists]
        return result, *lists

    return recorded(recorder, run, function)


def checkpoint_filled(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint(function, *args, **kwargs)``, not a reentrant one, which is handed mappings, as
    arguments or in a ``partial``."""
    options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    named = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    if isinstance(function, partial):
        args, named = (*function.args, *args), {**function.keywords, **named}
        function = function.func
    places = tuple([place for place, value in enumerate(args) if may_be_filled(type(value))])
    names = tuple([name for name, value in named.items() if may_be_filled(type(value))])
    run = partial(with_own_mappings, function, places, names)
    result, *filled = checkpoint(run, *args, **named, **options)
    mappings = [*[args[place] for place in places], *[named[name] for name in names]]
    for mapping, items in zip(mappings, filled, strict=True):
        for key, value in items.items():
            mapping[key] = value
    return result


def may_be_filled(kind: type) -> bool:
    """Whether it is a class of mappings, of which a copy is known to be one."""
    return kind in (dict, OrderedDict, defaultdict) or (
        issubclass(kind, UserDict) and kind.__init__ is UserDict.__init__
    )


#: Arguments of ``checkpoint`` that it does not hand on.
_OPTIONS = [*inspect.signature(checkpoint).parameters]


def with_own_mappings(
    function: Any, places: tuple[int, ...], names: tuple[str, ...], *args: Any, **kwargs: Any
) -> Any:
    """A function's result, and what it has put into its arguments at these places and of these
    names, which it is given as copies."""
    own = {place: _copy(args[place]) for place in places}
    own_named = {name: _copy(kwargs[name]) for name in names}
    given = [own.get(place, value) for place, value in enumerate(args)]
    result = function(*given, **{**kwargs, **own_named})
    filled = [_filled(args[place], own[place]) for place in places]
    return result, *filled, *[_filled(kwargs[name], own_named[name]) for name in names]


def _copy(mapping: Any) -> Any:
    return type(mapping)(mapping.data) if isinstance(mapping, UserDict) else mapping.copy()


def _filled(before: Any, after: Any) -> dict[Any, Any]:
    """In loops: a comprehension would hold the mapping, as another way to it."""
    found = {}
    for key in before:
        if key not in after:
            graph_break()  # what is taken out of one is not given with a result
    for key, value in after.items():
        if key not in before or not _is_still(value, before[key]):
            found[key] = value
    return found


def _is_still(value: Any, before: Any) -> bool:
    """Whether it is the same one; Dynamo asks that of tensors and numbers alone."""
    if isinstance(value, (tuple, list)) and isinstance(before, (tuple, list)):
        alike = len(value) == len(before)
        return alike and all([_is_still(a, b) for a, b in zip(value, before, strict=True)])
    return value is before


def with_own_lists(
    recorder: Any, names: tuple[str, ...], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """A function's result, and what its hooks have appended to the lists of these names, which
    begin as they are: some hooks go by how many there are."""
    lists = recorder.get()
    own = {**lists, **{name: [*lists[name]] for name in names}}
    recorder.set(own)
    result = function(*args, **kwargs)
    recorder.set(lists)
    return result, *[tuple(own[name][len(lists[name]) :]) for name in names]


# ---------------------------------------------------------------------------- in segments
def in_segments(
    functions: nn.Sequential | Iterable[Callable[[Any], Any]],
    segments: int,
    input: Any,  # the name it has in torch
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """What ``checkpoint_sequential`` gives, in a file that Dynamo does not skip: all segments but
    the last, which takes what is left over, are checkpointed."""
    parts = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    size = len(parts) // segments
    last = size * (segments - 1)

    def segment(first: int, end: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for part in parts[first:end]:
                x = part(x)
            return x

        return run

    how: dict[str, Any] = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve_rng_state}
    for first in range(0, last, size):
        input = checkpoint(segment(first, first + size), input, **how)
    return segment(last, len(parts))(input)
