"""Things a configuration names: ``module:function``, optimizers, losses; and their keywords."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fxrl import losses
from fxrl.errors import ConfigError
from fxrl.rl.binding import nearest


def load_function(spec: str) -> Callable[..., Any]:
    """The object that ``module:function`` names.

    Raises:
        ConfigError: the module cannot be imported or has no such function.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{spec!r} is not module:function")
    try:
        found: Any = importlib.import_module(module_name)
    # User code may raise anything while it is imported; the user must hear which line named it.
    except Exception as error:
        raise ConfigError(f"{spec!r}: importing {module_name} failed: {error!r}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")]
            near = nearest(part, known)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"{spec!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{spec!r} is {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


@contextmanager
def importable_from(*folders: Path) -> Iterator[None]:
    """Puts folders in front of ``sys.path``, so that ``rewards.py`` beside the config is found."""
    added = [str(folder.resolve()) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            if folder in sys.path:
                sys.path.remove(folder)


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names a call may give as keywords; ``None`` where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def wrong_keywords(
    function: Callable[..., Any], given: Mapping[str, Any], *, besides: Sequence[str] = ()
) -> list[str]:
    """One line for each key of ``given`` that ``function`` does not take."""
    known = keywords_of(function)
    if known is None:
        return []
    known = tuple(name for name in known if name not in besides)
    lines = []
    for key in given:
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(known)}"
            lines.append(f"{key}: no such key; {hint}")
    return lines


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` by its name, in any case.

    Raises:
        ConfigError: there is none.
    """
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    classes.pop("optimizer")
    if name.lower() not in classes:
        near = nearest(name.lower(), tuple(classes))
        hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(classes))}"
        raise ConfigError(f"name={name!r} is not in torch.optim; {hint}")
    return classes[name.lower()]


def loss_factory(name: str) -> Callable[..., Any]:
    """The factory of ``fxrl.losses`` by name, or a ``module:factory`` of the user's.

    Raises:
        ConfigError: there is none.
    """
    if ":" in name:
        return load_function(name)
    factory = losses.FACTORIES.get(name)
    if factory is None:
        near = nearest(name, tuple(losses.FACTORIES))
        hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(losses.FACTORIES))}"
        raise ConfigError(f"name={name!r} is not in fxrl.losses; {hint}")
    return factory
