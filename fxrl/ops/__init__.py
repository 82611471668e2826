"""fxrl's operators; each is documented where it stands."""

from __future__ import annotations

from typing import Any

from fxrl.errors import FxrlError


def once_differentiable(backward_op: Any) -> None:
    """Let an op that computes first derivatives say that it has no second ones."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise FxrlError(
            f"{backward_op._qualname} has no second derivative: fxrl's rewrites are differentiated "
            "once; cure: leave the rewrite out of this step with fxrl.Config(passes=[]), or drop "
            "create_graph=True"
        )

    backward_op.register_autograd(refuse)
