"""The fused loss head: log-probabilities of tokens, and their gradients, without logits.

``op``         what users and passes call, the opaque ops under it, autograd
``kept``       the forward of a trained head that keeps what spares a product in the backward
``arguments``  what the ops take and give           ``checks``  what they refuse
``reference``  the mathematics, in PyTorch          ``matmul``  the products, and how they round
"""

from __future__ import annotations

from fxrl.ops.linear_logprob.arguments import DIFFERENTIABLE, OUTPUTS, LossHead
from fxrl.ops.linear_logprob.checks import LinearLogprobError, TargetError
from fxrl.ops.linear_logprob.op import LinearLogprobOutput, attach, linear_logprob

__all__ = [
    "DIFFERENTIABLE",
    "OUTPUTS",
    "LinearLogprobError",
    "LinearLogprobOutput",
    "LossHead",
    "TargetError",
    "attach",
    "linear_logprob",
]
