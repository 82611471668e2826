"""The random batch on which the command line tries a loss."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxrl.errors import ConfigError
from fxrl.losses import completion_logits, token_stats
from fxrl.losses.registry import load_function
from fxrl.rl.config.named import importable_from

LOGP_STD = 0.1  # of old and reference log-probs around the policy's: some ratios get clipped


def make_batch(
    args: argparse.Namespace, model: nn.Module, device: str = "cpu", *, on_policy: bool = False
) -> Any:
    """A random batch with every key that ``fxrl.losses`` reads (see ``fxrl/losses/batch.py``).

    Prompts are padded on the left and completions end early, by random amounts, so masks matter.

    Args:
        args: ``batch``, ``tokens``, ``completion``, ``make_batch``, perhaps ``seed``.
        model: gives the vocabulary, and with ``on_policy`` the log-probabilities.
        device: where the tensors go.
        on_policy: let ``old_logps`` and ``ref_logps`` lie around the model's own, which takes an
            eager forward. The first sequence then has ratio 1, so that no loss, however tightly it
            clips, is without a gradient. Otherwise they lie around -log V, a random model's mean.

    Raises:
        ConfigError: ``--completion`` leaves no prompt, or ``--make-batch`` does not work.
    """
    size, length = args.batch, args.tokens
    completion = args.completion or max(1, length // 2)
    if completion >= length:
        raise ConfigError(
            f"--completion {completion} must be below --tokens {length}: a completion has a prompt"
        )
    vocab = vocabulary(model)
    if args.make_batch:
        with importable_from(Path.cwd()):
            made = load_function(args.make_batch)(size, length, completion, vocab)
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, made)
    random = torch.Generator().manual_seed(getattr(args, "seed", 0))
    pad = torch.randint(0, max(1, (length - completion) // 2), (size, 1), generator=random)
    ends = torch.randint(max(1, completion // 2), completion + 1, (size, 1), generator=random)
    batch = {
        "input_ids": torch.randint(0, vocab, (size, length), generator=random),
        "attention_mask": (torch.arange(length) >= pad).long(),
        "completion_mask": (torch.arange(completion) < ends).long(),
        "advantages": torch.randn(size, generator=random),
    }
    noise = LOGP_STD * torch.randn(2, size, completion, generator=random)
    noise[0, 0] = 0.0
    batch = {name: value.to(device) for name, value in batch.items()}
    around = _logps(model, batch, completion) if on_policy else torch.tensor(-math.log(vocab))
    old, ref = around.to(device) + noise.to(device)
    return batch | {"old_logps": old, "ref_logps": ref}


def _logps(model: nn.Module, batch: dict[str, Tensor], completion: int) -> Tensor:
    """The model's log-probabilities of the completions, [B, C], eager and without gradient."""
    with torch.no_grad():
        logits, _ = completion_logits(model, batch, completion)
        return token_stats(logits, batch["input_ids"][:, -completion:]).logps.float()


def vocabulary(model: nn.Module) -> int:
    """How many token ids the model's input embedding takes."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])
