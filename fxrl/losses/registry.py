"""A loss by its name: for configurations and command lines."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fxrl.losses.actor_critic import ppo
from fxrl.losses.batch import LossFn
from fxrl.losses.clipped import bnpo, dapo, dr_grpo, grpo, gspo, luspo
from fxrl.losses.errors import LossConfigError, nearest
from fxrl.losses.gated import cispo, sapo
from fxrl.losses.options import accepted, check_keywords
from fxrl.losses.policy_gradient import reinforce, rloo
from fxrl.losses.supervised import dpo, sft

FACTORIES: dict[str, Callable[..., LossFn]] = {
    factory.__name__: factory
    for factory in (
        grpo,
        dr_grpo,
        dapo,
        bnpo,
        gspo,
        luspo,
        cispo,
        sapo,
        reinforce,
        rloo,
        ppo,
        dpo,
        sft,
    )
}


def by_name(name: str, **kwargs: Any) -> LossFn:
    """The loss called ``name``, with ``kwargs`` as its settings.

    Args:
        name: a key of ``FACTORIES``, or ``"module:function"`` or ``"file.py:function"`` for your
            own. That function is
            the loss itself if it takes two positional arguments, ``(model, batch)``, and no
            others that lack a default (``kwargs`` are then bound to it); otherwise it is a
            factory, and is called with ``kwargs``.
        **kwargs: settings of the factory.

    Raises:
        LossConfigError: an unknown name, module, function, keyword, or a value out of range.
    """
    if ":" in name:
        return _imported(name, kwargs)
    if name not in FACTORIES:
        raise LossConfigError(f"no loss is called {name!r}{nearest(name, FACTORIES)}")
    return FACTORIES[name](**kwargs)


def keywords(factory: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names that ``factory`` takes as keywords; None if it takes any."""
    kinds = {parameter.kind for parameter in inspect.signature(factory).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds and factory not in FACTORIES.values()
    return None if takes_any else accepted(factory)


def _imported(path: str, kwargs: dict[str, Any]) -> LossFn:
    function = _load(path)
    required = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is inspect.Parameter.empty
        and p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (0, 2):
        raise LossConfigError(
            f"{path} needs {len(required)} arguments; a loss needs (model, batch), a factory none"
        )
    check_keywords(path, keywords(function) or tuple(kwargs), kwargs)
    if not required:
        loss: LossFn = function(**kwargs)
        return loss
    return functools.partial(function, **kwargs) if kwargs else function


def _load(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.rpartition(":")
    module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value)]
        raise LossConfigError(
            f"{module_name} has no function {attribute!r}{nearest(attribute, public)}"
        )
    return function  # type: ignore[no-any-return]


def _load_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise LossConfigError(f"{path!r} is not a file; give its path from {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise LossConfigError(
            f"{name!r}: there is no module {error.name!r} on sys.path; "
            "write 'package.module:function' or 'path/to/file.py:function'"
        ) from error
