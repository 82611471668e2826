"""A loss by its name: for configurations and command lines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fxrl.errors import did_you_mean
from fxrl.losses import actor_critic, supervised
from fxrl.losses import policy_losses as policy
from fxrl.losses.batch import LossConfigError, LossFn
from fxrl.losses.options import check_keywords
from fxrl.losses.own_code import load_function

_OWN = (
    *(policy.grpo, policy.dr_grpo, policy.dapo, policy.bnpo, policy.gspo, policy.luspo),
    *(policy.cispo, policy.sapo, policy.reinforce, policy.rloo),
    *(actor_critic.ppo, supervised.dpo, supervised.kto, supervised.sft),
    *(supervised.distill, supervised.reward_model),
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
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is inspect.Parameter.empty
        and p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (0, 2):
        raise LossConfigError(
            f"{path} needs ({', '.join(required)}); a loss needs (model, batch), a factory none"
        )
    check_keywords(path, function, kwargs)
    if not required:
        loss: LossFn = function(**kwargs)
        return loss
    return functools.partial(function, **kwargs) if kwargs else function
