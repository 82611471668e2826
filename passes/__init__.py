"""The passes fxrl ships; import as ``fxrl.passes``. ``REGISTRY`` is their whole order."""

from __future__ import annotations

if __name__ != "fxrl.passes":
    raise ImportError("import this package as 'fxrl.passes', not 'passes'")

from dataclasses import replace
from typing import Any

from fxrl.config import Config
from fxrl.errors import ConfigError, nearest
from fxrl.ir.graph_pass import Normalisation, Pass
from fxrl.ir.pipeline import Pipeline
from fxrl.passes.add_adapter_products import AddAdapterProducts
from fxrl.passes.chunk_vocab_region import ChunkVocabRegion
from fxrl.passes.differentiate_copies import DifferentiateCopies
from fxrl.passes.drop_unused_inputs import DropUnusedInputs
from fxrl.passes.eliminate_noops import EliminateNoops
from fxrl.passes.factor_masks import FactorMasks
from fxrl.passes.fold_broadcast_products import FoldBroadcastProducts
from fxrl.passes.fp8_lora import Fp8Lora
from fxrl.passes.fuse_linear_logprob import FuseLinearLogprob
from fxrl.passes.gather_by_inverse import GatherByInverse
from fxrl.passes.group_heads import GroupHeads
from fxrl.passes.group_queries import GroupQueries
from fxrl.passes.inline_layers import InlineLayers
from fxrl.passes.join_products import JoinProducts
from fxrl.passes.keep_exponentials import KeepExponentials
from fxrl.passes.merge_adapter_products import MergeAdapterProducts
from fxrl.passes.offload import Offload
from fxrl.passes.open_functions import OpenFunctions
from fxrl.passes.open_layer_checkpoints import OpenLayerCheckpoints
from fxrl.passes.open_loss_checkpoints import OpenLossCheckpoints
from fxrl.passes.outline_layers import OutlineLayers
from fxrl.passes.outline_norms import OutlineNorms
from fxrl.passes.rebatch_loops import RebatchLoops
from fxrl.passes.recompute import Recompute
from fxrl.passes.restore_causal_attention import RestoreCausalAttention
from fxrl.passes.select_detached_rows import SelectDetachedRows
from fxrl.passes.shard_sequence import ShardSequence
from fxrl.passes.split_adapted_weights import SplitAdaptedWeights
from fxrl.passes.stack_adapter_products import StackAdapterProducts
from fxrl.passes.tensorize_floats import TensorizeFloats
from fxrl.passes.tile_tokens import TileTokens

#: Every pass over a captured graph by name. They run in this order, the special before the general.
REGISTRY: dict[str, type[Pass[Any]]] = {
    one.name: one
    for one in (
        # one spelling for what PyTorch spells in several ways
        OpenLossCheckpoints,
        OpenFunctions,
        DifferentiateCopies,
        TensorizeFloats,
        RebatchLoops,
        FoldBroadcastProducts,
        JoinProducts,
        SelectDetachedRows,
        RestoreCausalAttention,
        GroupQueries,
        SplitAdaptedWeights,
        # from here on a sequence has as many tokens as a rank holds
        ShardSequence,
        # heads and layers become regions
        FactorMasks,
        FuseLinearLogprob,
        ChunkVocabRegion,
        OutlineLayers,
        InlineLayers,
        OpenLayerCheckpoints,
        OutlineNorms,
        Fp8Lora,
        # here the plan is made; what follows obeys it
        Recompute,
        TileTokens,
        GroupHeads,
        Offload,
        KeepExponentials,
        # nothing is left behind
        EliminateNoops,
        DropUnusedInputs,
    )
}

#: Over the joint graph of a region's body, whose gradients are values like others; and, when the
#: region's cut has made two graphs of it, over each.
JOINT_PIPELINE = Pipeline(
    (EliminateNoops(differentiated=True), GatherByInverse(), StackAdapterProducts())
)
#: Behind the first, where the device has a kernel that adds (``fxrl.ops.fp8.adds_adapters``).
ADDING_PIPELINE = Pipeline((AddAdapterProducts(),))
HALF_PIPELINE = Pipeline((MergeAdapterProducts(),))


def pipeline(config: Config) -> Pipeline:
    """The passes that a configuration asks for, in the order of ``REGISTRY``, with those that they
    require and those that only respell the graph.

    Raises ``ConfigError`` if ``config.passes`` or ``config.pass_options`` names an unknown pass, or
    an option that a pass does not have, or a value that it does not take.
    """
    told = config.pass_options or {}
    named_by = {"passes": config.passes or (), "pass_options": told}
    unknown = [(key, n) for key, names in named_by.items() for n in names if n not in REGISTRY]
    if unknown:
        lines = (f"{key}: {name!r} is unknown{nearest(name, REGISTRY)}" for key, name in unknown)
        raise ConfigError("\n".join(lines) + f" (there are {', '.join(REGISTRY)})")
    if config.passes is not None:  # what a named pass requires is asked for, too
        needed = [other for name in config.passes for other in REGISTRY[name].requires]
        config = replace(config, passes=(*config.passes, *needed))
    named = REGISTRY if config.passes is None else config.passes
    made = [one.of(config).told(told.get(one.name, {})) for one in REGISTRY.values()]
    chosen = [one for one in made if one.name in named or isinstance(one, Normalisation)]
    return Pipeline(tuple(sorted(chosen, key=lambda one: one.stage)))
