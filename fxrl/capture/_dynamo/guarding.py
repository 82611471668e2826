"""Guards of what Dynamo reads and does not guard."""

# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalSource
from torch._guards import Guard, Source

NOT_IN = getattr(  # torch 2.11: one guard says both
    GuardBuilder, "DICT_NOT_CONTAINS", partial(GuardBuilder.DICT_CONTAINS, invert=True)
)


def guard_by(code: Callable[..., str], source: Source, *others: Source) -> None:
    """Guard what Dynamo does not: an expression, made of how code reads the sources."""

    def hold(builder: GuardBuilder, guard: Guard) -> None:
        holds = code(*(builder.arg_ref(one.name) for one in (source, *others)))
        builder.object_aliasing_guard_codes.append((holds, holds))

    install_guard(source.make_guard(hold))


def guard_that(tx: Any, holds: Callable[[], bool]) -> None:
    """Guard something that is asked of no source."""
    guard_by(lambda own: f"{own}()", GlobalSource(tx.output.install_global("fxrl_holds", holds)))
