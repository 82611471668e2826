"""Numbers rounded to 16 bits up or down by chance, so that on average they are what they were.

NOTE [Why adapted weights are rounded by chance]: an update changes a weight by less than half
the distance of two bf16 numbers, for many updates on end. Rounded to the nearest, W + delta W is W
again, the sampler draws from a policy of some steps ago, and nothing shows it but the drift. One
update of SmolLM2-135M (LoRA r=16, learning rate 3e-4): a fifth of its change was left, as projected
onto it, and log-probs were 0.29 nat off on average, where the update itself moves them by 0.55; at
the fifth update two thirds and 0.20 nat. Rounded by chance all of it is there on average: the noise
is larger in each entry and has no direction, and log-probs are 0.006 nat off at every step (all
else in float32; of training Gupta et al. 2015, arXiv:1502.02551, found the same). In a run with
vLLM the drift of 20 such steps went from 0.15 to 0.046 nat, which is that of vLLM's own LoRA
kernels (bench/results/drift_smollm2_h100.json).

The chance is the entry's place and the weight's seed: on one device a weight that did not change is
rounded as before, at each rollout, and a run that is resumed samples the same.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

#: Low bits of a float32 that a number of this dtype has no place for.
DROPPED = {torch.bfloat16: 16, torch.float16: 13}
#: Entries that are rounded at a time: 256 MiB of scratch.
_TILE = 2**24


def seed_of(name: str) -> int:
    """A weight's seed, by its name."""
    return crc32(name.encode()) >> 1  # fits 31 bits, as kernels take it


def dithered(value: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """``value`` in another dtype: rounded by chance to bf16 or fp16, to others as ever.

    A number that ``dtype`` has stays what it is. fp16 below 6.1e-5 is rounded to the nearest.
    """
    dropped = DROPPED.get(dtype)
    if dropped is None or not value.is_floating_point() or value.itemsize < 4:
        return value.to(dtype)
    chance = torch.Generator(value.device).manual_seed(seed)
    made = torch.empty(value.shape, dtype=dtype, device=value.device)
    flat = value.contiguous().view(-1)
    tiles = zip(torch.split(flat, _TILE), torch.split(made.view(-1), _TILE), strict=True)
    for source, target in tiles:
        bits = source.float().view(torch.int32)
        noise = torch.empty_like(bits).random_(0, 1 << dropped, generator=chance)
        target.copy_(noise.add_(bits).bitwise_and_(-(1 << dropped)).view(torch.float32))
    return made
