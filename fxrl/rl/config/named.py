"""What a configuration names: ``module:function``, optimizers, losses; and their keywords."""

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
from fxrl.losses.registry import keywords as loss_keywords
from fxrl.rl.config.binding import nearest


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
    return _unknown(given, tuple(name for name in known if name not in besides))


_OTHER_NAMES = {"learning_rate": "lr", "lr_scheduler_type": "schedule", "scheduler": "schedule"}


def _unknown(given: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    lines = []
    for key in given:
        if key not in known:
            near = _OTHER_NAMES.get(key) or nearest(key, known)
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


def optimizer_problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with an ``[optim]`` table's name and further keys, one line each."""
    try:
        found = optimizer_class(name)
    except ConfigError as error:
        return [str(error)]
    return wrong_keywords(found, options, besides=("params", "lr"))


PROVIDED = ("temperature", "max_completion_length")
"""Loss settings that ``[sampling]`` gives where ``[loss]`` does not."""
_NO_ROLLOUT = {"ppo": "values", "dpo": "preference pairs", "sft": "reference completions"}


def loss_problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a ``[loss]`` table, one line each."""
    if name in _NO_ROLLOUT:
        return [
            f"name={name!r} needs {_NO_ROLLOUT[name]}, which rollouts do not give; use grpo or "
            "another policy loss"
        ]
    if (factory := losses.FACTORIES.get(name)) is not None:
        known = loss_keywords(factory) or ()
        lines = _unknown(options, known)
        options = {key: value for key, value in options.items() if key in known}
        if "max_completion_length" in known:
            options = {"max_completion_length": 1} | options
    else:
        lines = []
    try:
        losses.by_name(name, **options)
    except ConfigError as error:
        lines.append(str(error))
    except TypeError as error:
        lines.append(f"name={name!r}: {error}")
    return lines


def build_loss(
    name: str, options: Mapping[str, Any], *, temperature: float, max_tokens: int
) -> losses.LossFn:
    """The loss with its settings; see ``PROVIDED``."""
    given = {"temperature": temperature, "max_completion_length": max_tokens}
    factory = losses.FACTORIES.get(name)
    known = loss_keywords(factory) if factory is not None else ()
    provided = {key: given[key] for key in PROVIDED if key in (known or ())}
    return losses.by_name(name, **(provided | dict(options)))
