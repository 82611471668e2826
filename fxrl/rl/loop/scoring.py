"""Log-probabilities of given completions: of the policy before an update, of the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.losses import completion_logits, token_stats
from fxrl.rl.types import Batch

Optimize = Callable[[nn.Module, Callable[[nn.Module, Any], Any]], Callable[[Batch], Any]]
"""``fxrl.optimize`` with its configuration bound, or its plain twin."""


class Scorer:
    """``scorer(batch) -> [B, C]`` log-probabilities without gradient.

    Args:
        model: whose.
        optimize: makes the step; the logits do not exist here either.
        temperature: that of sampling.
        context: entered around each call, such as PEFT's ``disable_adapter``.
        wrap: around the loss, such as autocast.

    NOTE [One step per state of the adapter]
    The reference and the policy each have a step of their own, captured in the state it is always
    called in. One step for both would have to be captured anew whenever the adapter is switched.
    """

    def __init__(
        self,
        model: nn.Module,
        optimize: Optimize,
        temperature: float,
        *,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        def logps(model: nn.Module, batch: Batch) -> Tensor:
            num = batch["completion_mask"].shape[1]
            logits, _ = completion_logits(model, batch, num)
            tokens = batch["input_ids"][:, -num:]
            return token_stats(logits, tokens, temperature=temperature).logps

        self.model, self.context = model, context
        self.step = optimize(model, wrap(logps))

    def __call__(self, batch: Batch) -> Tensor:
        """Log-probabilities in eval mode: dropout is no part of a policy."""
        keep = ("input_ids", "right_padded", "completion_mask")
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.context():
                found: Tensor = self.step({name: batch[name] for name in keep})
        finally:
            self.model.train(training)
        return found


def reference(
    model: nn.Module,
) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """The reference policy: ``model`` with its adapter switched off, else a frozen copy."""
    if hasattr(model, "disable_adapter"):
        switch: Any = model.disable_adapter
        return model, switch
    frozen = copy.deepcopy(model)
    frozen.requires_grad_(False)
    return frozen, nullcontext
