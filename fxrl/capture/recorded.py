"""What hooks of transformers record, as a part of what the code around them gives.

    model(ids, output_attentions=True, output_router_logits=True)

A model makes a list for each such output, and hooks inside of its layers append to it. What equal
layers share, and what is checkpointed, gives tensors and changes nothing outside; so it runs with
lists of its own, and what has been appended is given with its result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint


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
