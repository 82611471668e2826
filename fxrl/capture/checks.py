"""``if torch.isnan(x).any(): raise ...``: checks of values stay in the graph, and end its call.

Traced code cannot raise what the user's code would: the text is made of values. So a branch that
does nothing but raise becomes one op, which ends the call when its tensor is false; the loss is
then run as it was written, and raises its own error from its own line, or handles it. A branch that
does something else is followed one way, and checked likewise (``fxrl.capture.branches``). So is a
loop over the rows that were found: for as many as there may be; and one over chunks of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CheckFailedError(Exception):
    """Traced code would have raised here, or gone another way. Only a backward that runs layers
    again shows it.

    Attributes:
        branch: the number of the branch that goes another way; None for code that raises.
        found: how many rows there are where the branch is a loop over them.
        source: file and line of code that raises.
    """

    def __init__(
        self, branch: int | None = None, found: int | None = None, source: str = ""
    ) -> None:
        self.branch, self.found, self.source = branch, found, source
        super().__init__(
            "a check of the loss or of the model does not hold where the backward runs it again; "
            "it held in the forward, so what it reads is not computed alike twice"
        )


@torch.library.custom_op(
    "fxrl::check", mutates_args=(), schema='(Tensor passes, int? branch=None, str source="") -> ()'
)
def _check(passes: Tensor, branch: int | None = None, source: str = "") -> None:
    if not passes:
        raise CheckFailedError(branch, source=source)


_check.register_fake(lambda *_: None)
check = torch.fx.has_side_effect(torch.ops.fxrl.check.default)
"""Raises ``CheckFailedError`` where its tensor, of one element, is false; waits for its device."""


@torch.library.custom_op(
    "fxrl::counted_rows", mutates_args=(), schema="(Tensor rows, int count, int branch) -> Tensor"
)
def _counted_rows(rows: Tensor, count: int, branch: int) -> Tensor:
    if len(rows) != count:
        raise CheckFailedError(branch, len(rows))
    return rows.clone()


@_counted_rows.register_fake
def _(rows: Tensor, count: int, branch: int) -> Tensor:
    return rows.new_empty(count, *rows.shape[1:])


counted_rows = torch.fx.has_side_effect(torch.ops.fxrl.counted_rows.default)
"""A tensor of indices as one of ``count`` rows; raises ``CheckFailedError`` where it has others."""


@torch.library.custom_op(
    "fxrl::counted_rounds",
    mutates_args=(),
    schema="(Tensor stop, int start, int step, int count, int branch) -> ()",
)
def _counted_rounds(stop: Tensor, start: int, step: int, count: int, branch: int) -> None:
    if (found := len(range(start, int(stop), step))) != count:
        raise CheckFailedError(branch, found)


_counted_rounds.register_fake(lambda *_: None)
counted_rounds = torch.fx.has_side_effect(torch.ops.fxrl.counted_rounds.default)
"""Raises ``CheckFailedError`` where ``range(start, stop, step)`` is not ``count`` long."""
