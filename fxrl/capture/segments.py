"""``checkpoint_sequential`` as calls of ``checkpoint``, which alone is traced.

It stands in a file of torch's that Dynamo skips, so a graph would end there and the layers run as
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def in_segments(
    functions: nn.Sequential | Iterable[Callable[[Any], Any]],
    segments: int,
    input: Any,  # the name it has in torch
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """What ``checkpoint_sequential`` gives: all segments but the last, which takes what is left
    over, are checkpointed."""
    parts = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    size = len(parts) // segments
    last = size * (segments - 1)

    def segment(first: int, end: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for part in parts[first:end]:
                x = part(x)
            return x

        return run

    options: dict[str, Any] = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
    }
    for first in range(0, last, size):
        input = checkpoint(segment(first, first + size), input, **options)
    return segment(last, len(parts))(input)
