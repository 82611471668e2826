"""``tensor.register_hook(hook)`` before the loss, of a hook that never looks at its gradient.

Such a hook counts backwards, or asks whether one may run: libraries put one on what a model
returns. On the logits it would keep them and their gradient alive. So the graph is captured without
it, and at each call it is hung on the loss, which the same backward begins at.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

#: Of code that runs when it is asked for its next value.
_YIELDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_waiting: list[Callable[[Tensor], None]] = []


def looks_away(code: CodeType, given: int) -> bool:
    """Whether a function returns nothing, and never reads the argument that follows ``given``."""
    if given < code.co_argcount:
        name = code.co_varnames[given]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return False
    found = list(dis.get_instructions(code))
    returned = [found[at - 1] for at, one in enumerate(found) if one.opname == "RETURN_VALUE"]
    returned += [one for one in found if one.opname == "RETURN_CONST"]
    reads = any("FAST" in one.opname and name in _names(one.argval) for one in found)
    silent = all("CONST" in one.opname and one.argval is None for one in returned)
    return silent and not reads and name not in code.co_cellvars and not code.co_flags & _YIELDS


def _names(argval: Any) -> tuple[Any, ...]:
    return argval if isinstance(argval, tuple) else (argval,)  # some instructions read two


def hang_on_loss(hook: Callable[[Tensor], None]) -> None:
    """Called by captured code, where it would have registered the hook."""
    _waiting.append(hook)


def hung(captured: Callable[[Any], Any], batch: Any) -> Any:
    """``captured(batch)``, with the hooks of this call on the first of it that has a gradient: the
    loss."""
    _waiting.clear()  # a call that failed may have left some
    result = captured(batch)
    leaves = pytree.tree_leaves(result) if _waiting else ()
    for loss in [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad][:1]:
        for hook in _waiting:
            loss.register_hook(hook)  # type: ignore[no-untyped-call]
    return result
