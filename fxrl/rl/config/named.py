"""What a configuration names: optimizers, losses, rewards; and their keywords."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import torch
from torch import nn

from fxrl import losses
from fxrl.errors import ConfigError, did_you_mean
from fxrl.losses.options import accepted
from fxrl.losses.own_code import load_function
from fxrl.options import fit, misfit
from fxrl.rl.builtin_rewards import BUILT_IN, PROVIDED
from fxrl.rl.config import trl
from fxrl.rl.errors import name_of


def wrong_keywords(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    besides: Sequence[str] = (),
    table: str = "",
    name: str = "",
    keys: Sequence[str] = (),
) -> list[str]:
    """A line for each key of ``given`` that ``function`` does not take, or that is in ``besides``,
    not the user's to give. ``table`` is where the keys stand, such as ``optim``, ``name`` what it
    calls the function, and ``keys`` are further ones that it has."""
    if (takes := accepted(function)) is None:
        return []
    known = [one for one in takes if one not in besides]
    return [
        f"{key}: no such key{_instead(key, [*known, *keys], table, name)}"
        for key in given
        if key not in known
    ]


def _instead(key: str, known: Sequence[str], table: str, name: str) -> str:
    if key in trl.INSTEAD:
        return f"; {trl.INSTEAD[key]}"
    near = trl.KEYS.get(key)
    if near is None and not difflib.get_close_matches(key, known, n=1):
        near = next((trl.KEYS[k] for k in difflib.get_close_matches(key, trl.KEYS, n=1)), None)
    if near is None:
        return did_you_mean(key, known)
    leaf = near.removeprefix(f"{table}.")
    if leaf != near and leaf not in known:  # a key of this table, under another name
        return f" of {name!r}{did_you_mean('', known)}"
    return f"; did you mean {leaf!r}?"


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` by its name, in any case."""
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    classes.pop("optimizer")
    if name.lower() not in classes:
        near = did_you_mean(name.lower(), classes)
        raise ConfigError(f"name={name!r} is not in torch.optim{near}")
    return classes[name.lower()]


def optimizer_problems(
    name: str, options: Mapping[str, Any], keys: Sequence[str] = ()
) -> list[str]:
    """What is wrong with an ``[optim]`` table's name and further keys, one line each."""
    try:
        found = optimizer_class(name)
        lines = wrong_keywords(
            found, options, besides=("params", "lr"), table="optim", name=name, keys=keys
        )
        lines += _misfits(found, options)
        if not lines:
            make_optimizer(name, [nn.Parameter(torch.zeros(2, 2))], options)
    except ConfigError as error:
        return [str(error)]
    return lines


def _misfits(made: type[Any], options: Mapping[str, Any]) -> Iterator[str]:
    """A line for each keyword whose value is of another kind than its annotation. An optimizer
    compares it without looking, or takes it all the same."""
    hints = get_type_hints(made.__init__)
    for key, value in options.items():
        if key not in hints:
            continue
        try:
            fit(hints[key], value)
        except TypeError:
            yield f"{key}={misfit(hints[key], value)}"


def make_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    options: Mapping[str, Any],
    wrapper: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer ``name`` with its keywords; TOML's lists become tuples. A ``wrapper`` is called
    with the parameters and the optimizer's class, and makes the result."""
    keywords = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    make: Callable[..., torch.optim.Optimizer] = optimizer_class(name)
    try:
        if wrapper is not None:
            return wrapper(parameters, make, **keywords)
        return make(parameters, **keywords)
    except Exception as error:  # each checks its own keywords, or fails at them
        raise ConfigError(f"name={name!r} refuses {keywords}: {error}") from error


BUILT = ("teacher",)
"""Keywords of losses that no file can give: the trainer builds what they get."""


def loss_problems(name: str, options: Mapping[str, Any], keys: Sequence[str] = ()) -> list[str]:
    """What is wrong with a ``[loss]`` table, one line each."""
    lines: list[str] = []
    if (factory := losses.FACTORIES.get(name)) is not None:
        lines = wrong_keywords(factory, options, besides=BUILT, table="loss", name=name, keys=keys)
        known = accepted(factory) or ()
        options = {key: value for key, value in options.items() if key in known}
        if "max_completion_length" in known:
            options = {"max_completion_length": 1} | options
    try:
        losses.by_name(name, **options)
    except ConfigError as error:
        named = name in losses.FACTORIES
        lines.append(str(error) if named else f"name={name!r}: {error}")
    except Exception as error:  # of a factory of the user's
        lines.append(f"name={name!r}: {error!r}")
    return lines


def build_loss(
    name: str,
    options: Mapping[str, Any],
    *,
    temperature: float,
    max_tokens: int,
    teacher: nn.Module | None = None,
) -> losses.LossFn:
    """The loss; ``[sampling]`` gives its temperature and length where ``[loss]`` does not.

    One of the user's gets those of ``temperature``, ``max_completion_length`` and ``teacher`` that
    it names.
    """
    given = {
        "temperature": temperature,
        "max_completion_length": max_tokens,
        "teacher": teacher,
    }
    known = {k: v for k, v in given.items() if takes_keyword(name, k)}
    return losses.by_name(name, **known | dict(options))


def takes_keyword(name: str, key: str) -> bool:
    """Whether the loss ``name`` names a keyword."""
    return key in (accepted(_function(name)) or ())


def keyword(name: str, options: Mapping[str, Any], key: str, default: Any) -> Any:
    """What the loss ``name`` has as ``key``: of ``options``, else its signature's default, if any.

    A loss without that keyword has ``default``.
    """
    found = inspect.signature(_function(name)).parameters.get(key)
    unset = default if found is None or found.default is found.empty else found.default
    return options.get(key, unset)


def _function(name: str) -> Callable[..., Any]:
    return load_function(name) if ":" in name else losses.FACTORIES[name]


def code_problem(given: str | Callable[..., Any]) -> str | None:
    """Why ``file.py:function`` or ``module:function`` names no code of the user's, if so."""
    if callable(given):
        return None
    if not isinstance(given, str) or ":" not in given:
        return f"{given!r} is no module:function"
    try:
        load_function(given)
    except ConfigError as error:
        return str(error)
    return None


def reward_name(given: str | Callable[..., Any]) -> str:
    """A reward as the configuration names it, one that Python gives by its function's name."""
    return given if isinstance(given, str) else name_of(given)


def _builtin_problems(name: str, keywords: Mapping[str, Any]) -> list[str]:
    factory = BUILT_IN[name]
    takes = inspect.signature(factory).parameters
    if wrong := wrong_keywords(factory, keywords, besides=PROVIDED):
        return wrong
    needed = [n for n, p in takes.items() if p.default is p.empty and n not in PROVIDED]
    if missing := [n for n in needed if n not in keywords]:
        return [f"{n}: missing; it has no default" for n in missing]
    try:
        factory(**{n: "" for n in PROVIDED if n in takes}, **keywords)
    except ConfigError as error:
        return [str(error)]
    return []


def reward_problems(
    functions: Sequence[str | Callable[..., Any]], params: Mapping[str, Any]
) -> list[str]:
    """One line per name that is no reward and per wrong keyword; imports the user's modules."""
    lines = []
    for name in functions:
        if not isinstance(name, str):
            continue
        if name in BUILT_IN:
            keywords = params.get(name, {})
            if not isinstance(keywords, Mapping):
                lines.append(f"params.{name}={keywords!r} is not a table")
                continue
            lines += [f"params.{name}.{line}" for line in _builtin_problems(name, keywords)]
        elif ":" in name:
            if (problem := code_problem(name)) is not None:
                lines.append(f"functions: {problem}")
        else:
            near = did_you_mean(name, BUILT_IN)
            lines.append(f"functions: {name!r} is neither module:function nor built in{near}")
    known = {reward_name(one) for one in functions}
    lines += [f"params.{name}: no such entry in functions" for name in params if name not in known]
    return lines
