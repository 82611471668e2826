"""From a model's logits to log-probabilities and entropies of completion tokens.

Shapes: B sequences, T tokens of prompt and completion, C tokens of completion, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fxrl.dtypes import at_least_float32
from fxrl.losses.batch import Batch, model_inputs

EntropyUse = Literal["none", "log", "loss"]


class TokenStats(NamedTuple):
    """Attributes: logps: [B, C]. entropy: [B, C] in nats; None if not asked for."""

    logps: Tensor
    entropy: Tensor | None


def completion_logits(
    model: nn.Module, batch: Batch, num_tokens: int, **model_options: Any
) -> tuple[Tensor, Any]:
    """Logits [B, C, V] that predict the last ``num_tokens`` = C tokens, and the model's output.

    NOTE [Why both logits_to_keep and a slice]: ``logits_to_keep`` spares the model the prompt's
    logits; the slice is right as well for a model that takes the keyword and ignores it.
    """
    output = model(**model_inputs(batch), logits_to_keep=num_tokens + 1, **model_options)
    return output.logits[:, -(num_tokens + 1) : -1], output


def token_stats(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, entropy: EntropyUse = "none"
) -> TokenStats:
    """Log-probability of each token, and the entropy of its distribution.

        log pi(o_t) = z_t[o_t] - logsumexp(z_t),  z = logits / temperature
        H_t = - sum_v pi_t(v) log pi_t(v)

    Args:
        logits: [B, C, V]; 16-bit logits are worked on in float32.
        tokens: [B, C] int64.
        temperature: the one the tokens were sampled at.
        entropy: ``"log"`` takes it without gradient, ``"loss"`` with.
    """
    scaled = at_least_float32(logits)
    if temperature != 1.0:
        scaled = scaled / temperature
    all_logps = torch.log_softmax(scaled, dim=-1)  # [B, C, V]
    logps = all_logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if entropy == "none":
        return TokenStats(logps, None)
    if entropy == "loss":
        return TokenStats(logps, entropy_of(all_logps))
    with torch.no_grad():
        return TokenStats(logps, entropy_of(all_logps))


def entropy_of(all_logps: Tensor) -> Tensor:
    """Entropy of distributions, in nats: log-probs [..., V] -> [...]."""
    return -(all_logps.exp() * all_logps).sum(-1)


def bounded_exp(exponent: Tensor) -> Tensor:
    """``exp``, but never inf.

    NOTE [Why exponents are bounded]: an infinite ratio turns into NaN in backward, also where
    the clipped branch was taken (0 * inf). A third of the dtype's exponent range (e^29 in float32,
    e^236 in float64) is far beyond every clip bound in use, so no clipping decision changes, and
    a product of three such factors is still finite. Beyond it the gradient is 0, as of a clip.
    """
    return torch.exp(exponent.clamp(max=exponent_bound(exponent.dtype)))


def exponent_bound(dtype: torch.dtype) -> float:
    """The largest exponent that ``bounded_exp`` takes as it is."""
    return {torch.float64: 236.0}.get(dtype, 29.0)
