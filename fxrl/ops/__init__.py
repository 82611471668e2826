"""fxrl's operators; each is documented where it stands."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxrl.errors import FxrlError


def no_second_derivative(backward_op: Any) -> None:
    """Let an op that computes first derivatives say that it has no second ones."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise FxrlError(
            f"{backward_op._qualname} has no second derivative: fxrl's rewrites are differentiated "
            "once; cure: leave the rewrite out of this step with fxrl.Config(passes=[]), or drop "
            "create_graph=True"
        )

    backward_op.register_autograd(refuse)


def check_rows(ids: Tensor, rows: int) -> None:
    """Raises ``IndexError``, on a CPU, if a table of so many rows has no such ones."""
    if ids.device.type == "cpu" and ((ids < 0) | (ids >= rows)).any():
        raise IndexError(f"ids are from {ids.min()} to {ids.max()}, and there are {rows}")


def turned_backward(product: Any) -> None:
    """Let the backward of ``product(rows, weight, *options, transpose)``, whose weight is frozen,
    be the same product the other way round."""

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        _, weight, *ctx.options, ctx.transpose = inputs
        ctx.save_for_backward(*weight)

    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        weight = list(ctx.saved_tensors)
        made = product(grad, weight, *ctx.options, not ctx.transpose)
        return made, [None for _ in weight], *(None for _ in ctx.options), None

    product.register_autograd(backward, setup_context=keep)
