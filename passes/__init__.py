"""The passes fxrl ships; import as ``fxrl.passes``. ``pipeline`` is their whole order."""

from __future__ import annotations

if __name__ != "fxrl.passes":
    raise ImportError("import this package as 'fxrl.passes', not 'passes'")

from collections.abc import Sequence
from typing import Any

from fxrl.errors import ConfigError
from fxrl.ir.graph_pass import RewritePass
from fxrl.passes.chunk_vocab_region import ChunkVocabRegion
from fxrl.passes.fuse_linear_logprob import FuseLinearLogprob
from fxrl.passes.recompute import Recompute
from fxrl.passes.restore_causal_attention import RestoreCausalAttention

#: Every pass by name, in the order in which they run: the special before the general.
REGISTRY: dict[str, type[RewritePass[Any]]] = {
    RestoreCausalAttention.name: RestoreCausalAttention,
    FuseLinearLogprob.name: FuseLinearLogprob,
    ChunkVocabRegion.name: ChunkVocabRegion,
    Recompute.name: Recompute,
}


def pipeline(names: Sequence[str] | None) -> list[RewritePass[Any]]:
    """The passes to run: the default order, or those named, in the given order.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names or ():
        if name not in REGISTRY:
            known = ", ".join(REGISTRY)
            raise ConfigError(f"passes: {name!r} is unknown; the passes are {known}")
    return [REGISTRY[name]() for name in (REGISTRY if names is None else names)]
