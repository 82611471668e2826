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

from fxrl.errors import did_you_mean
from fxrl.losses import actor_critic, supervised
from fxrl.losses import policy_losses as policy
from fxrl.losses.batch import LossConfigError, LossFn
from fxrl.losses.options import check_keywords

_OWN = (
    *(policy.grpo, policy.dr_grpo, policy.dapo, policy.bnpo, policy.gspo, policy.luspo),
    *(policy.cispo, policy.sapo, policy.reinforce, policy.rloo),
    *(actor_critic.ppo, supervised.dpo, supervised.sft),
)
FACTORIES: dict[str, Callable[..., LossFn]] = {factory.__name__: factory for factory in _OWN}


def by_name(name: str, **kwargs: Any) -> LossFn:
    """The loss called ``name``, with ``kwargs`` as its settings.

    Args:
        name: a key of ``FACTORIES``, or ``"module:function"`` or ``"file.py:function"`` for your
            own. That function is the loss itself if it takes two positional arguments,
            ``(model, batch)``, and no others that lack a default (``kwargs`` are then bound to
            it); otherwise it is a factory, and is called with ``kwargs``.
        **kwargs: settings of the factory.

    Raises:
        LossConfigError: an unknown name, module, function, keyword, or a value out of range.
    """
    if ":" in name:
        return _imported(name, kwargs)
    if name not in FACTORIES:
        raise LossConfigError(f"no loss is called {name!r}{did_you_mean(name, FACTORIES)}")
    return FACTORIES[name](**kwargs)


def _imported(path: str, kwargs: dict[str, Any]) -> LossFn:
    function = load_function(path)
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
    check_keywords(path, function, kwargs)
    if not required:
        loss: LossFn = function(**kwargs)
        return loss
    return functools.partial(function, **kwargs) if kwargs else function


def load_function(path: str) -> Callable[..., Any]:
    """What ``module:function`` or ``file.py:function`` names.

    Raises:
        LossConfigError: there is no such file, module or function, or importing it failed.
    """
    home, _, attribute = path.rpartition(":")
    try:
        found: Any = _load_file(home) if home.endswith(".py") else importlib.import_module(home)
    except LossConfigError:
        raise
    # User code may raise anything while it is imported; the user must hear which line named it.
    except Exception as error:
        raise LossConfigError(
            f"{path!r}: importing {home!r} failed: {error!r}; write 'package.module:function' or "
            "'path/to/file.py:function'"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise LossConfigError(f"{home} has no function {part!r}{did_you_mean(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise LossConfigError(f"{path!r} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _load_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise LossConfigError(f"{path!r} is not a file; give its path from {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
