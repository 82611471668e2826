"""Run the loss head and all that reads vocabulary-sized values tile by tile over tokens.

    %logits = mm(%hidden, %weight)                       [N, V]  the peak of an RL step
    %x      = any row-local ops of %logits               [N, V]
    %out    = any reduction of %x over the vocabulary    [N]
becomes
    %out    = fxrl.region([%rows, %weight, ...])         one tile of logits at a time

Any loss will do: what counts is that each token's row is computed from its own hidden state. Row
selections (shifts, slices, masks, index-selects) move above the matmul, so rows that nobody reads
are not projected. The region recomputes its tile in the backward, or makes each row's gradient in
the forward (``rows.cost.made_in_forward``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar, final

import torch
from torch import fx

import fxrl.ops.region.op  # noqa: F401  (declares torch.ops.fxrl.region)
from fxrl.analysis.rows.analysis import HeadSite, RowProgram, analyse
from fxrl.analysis.rows.cost import eager_bytes, made_in_forward, row_bytes, tile_rows
from fxrl.analysis.rows.emit import Feeds, RowEmitter, body_graph
from fxrl.analysis.rows.expr import Leaf
from fxrl.config import Config, parse_bytes
from fxrl.ir.graph import has_hint, hint, last_input, nbytes, needs_grad, shape_of, val_of
from fxrl.ir.graph_pass import Applied, Miss, Pass, PassDoc, Site
from fxrl.ir.plan import Choice, Keep, TileHead, describe
from fxrl.ir.region import InputSpec, Region, call_region, differentiated
from fxrl.ir.remark import Refusal, format_bytes

DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True, slots=True)
class HeadCluster(Site):
    """One or more heads whose logits meet, and the row programs that replace them."""

    head: HeadSite


H = TypeVar("H", bound=HeadCluster)


@dataclass(frozen=True)
class HeadPass(Pass[H]):
    """Base of the passes over loss heads: they take the clusters that save enough memory."""

    tile_tokens: int = 0  # rows per tile; 0 lets the tile's bytes decide
    min_saved_bytes: int = 0  # a head predicted to save less stays

    @classmethod
    def of(cls, config: Config) -> Self:
        """Tiles and threshold as configured."""
        return cls(config.chunk_tokens or 0, parse_bytes(config.min_saved_bytes))

    @final
    def match(self, gm: fx.GraphModule) -> Iterator[H | Miss]:
        for found in analyse(gm.graph):
            if isinstance(found, Miss):
                yield found
                continue
            try:
                yield self.site(found)
            except Refusal as refusal:
                yield Miss(found.anchor, refusal)

    @abstractmethod
    def site(self, head: HeadSite) -> H:
        """A cluster that analysis found legal, as this pass takes it; or a Refusal."""

    def decide(self, site: H) -> Choice:
        """Worth it by the bytes it saves."""
        if site.saved_bytes >= self.min_saved_bytes:
            return TileHead(self.name, self.tile_tokens)
        least = f"min_saved_bytes={format_bytes(self.min_saved_bytes)}"
        reason = f"it would save {format_bytes(site.saved_bytes)}, below {least}"
        return Keep(reason, cure="pass fxrl.Config(min_saved_bytes=0) to have it anyway")

    @final
    def rewrite(self, gm: fx.GraphModule, site: H, choice: Choice) -> Applied:
        if not isinstance(choice, TileHead):
            raise Refusal(f"the plan says {describe(choice)!r}, which is for another kind of site")
        per_row = row_bytes(site.head)
        tile = tile_rows(per_row, val_of(site.anchor).device, choice.tile_tokens)
        sizes = shape_of(site.anchor)  # of the batch that is captured, as all bytes that are told
        shape = " x ".join(str(hint(size) if has_hint(size) else size) for size in sizes)
        did, kept_bytes = self.replace(gm, site, choice.tile_tokens, tile)
        saved_bytes = max(0, site.saved_bytes - 3 * tile * per_row - kept_bytes)
        return Applied(f"logits [{shape}] {did}", saved_bytes)

    @abstractmethod
    def replace(self, gm: fx.GraphModule, site: H, tile_tokens: int, tile: int) -> tuple[str, int]:
        """Rewrite one cluster; returns what becomes of its logits, in words, and the bytes of the
        gradients that its forward makes. ``tile_tokens`` are the rows per tile that were asked for
        (0: none), ``tile`` those that fit."""


@dataclass(frozen=True)
class ChunkVocabRegion(HeadPass[HeadCluster]):
    """General: any row-local loss, in tiles of rows."""

    save_vectors: bool = True  # make gradients in the forward where that spares products

    name = "chunk-vocab-region"
    doc = PassDoc(
        "`lm_head` and any row-local PyTorch after it that ends without a vocabulary dim",
        "all but one tile of the logits and of everything computed from them",
        "frozen head, outputs of one number per row: one `[N, H]` vector for each that is "
        "differentiated, unless `save_vectors` is off; else, and where that spares no product, the "
        "tile's matmul once more in backward",
        "logits escape (returned, hooked, stored, sampled from) or tokens are mixed",
    )

    def site(self, head: HeadSite) -> HeadCluster:
        return HeadCluster(head.anchor, eager_bytes(head), head)

    def replace(
        self, gm: fx.GraphModule, site: HeadCluster, tile_tokens: int, tile: int
    ) -> tuple[str, int]:
        vectors = run_by_tiles(gm, site.head, tile, save_vectors=self.save_vectors)
        beside = ", which make the gradients too" if vectors else ""
        return f"live in tiles of {tile} rows{beside}", vectors


def run_by_tiles(
    gm: fx.GraphModule, head: HeadSite, tile: int, *, save_vectors: bool = False
) -> int:
    """Replace a site's row programs by regions with tiles of ``tile`` rows, which make gradients in
    the forward where they may (``save_vectors``) and that spares products; call ``tidy``
    afterwards. Returns the bytes of these gradients. Raises ``Refusal``, leaving only dead nodes
    behind, if a size is not known where it is needed."""
    with gm.graph.inserting_after(last_input(gm.graph)):
        emitter = RowEmitter(gm.graph)
        plans = [_feed(emitter, program) for program in head.programs]
        vectors = [
            _replace(gm, emitter, program, inputs, tile, save_vectors)
            for program, inputs in zip(head.programs, plans, strict=True)
        ]
        emitter.count_rows(head.wide)
    return sum(vectors)


def _feed(emitter: RowEmitter, program: RowProgram) -> Feeds:
    """The program's inputs; whatever can be refused is refused here, before the graph changes."""
    emitter.check_restorable(output.value for output in program.outputs)
    return emitter.inputs(program.roots)


def _is_trained(leaf: Leaf, feed: fx.Node) -> bool:
    """Whether a leaf gets a gradient; the row numbers that may stand for it get none."""
    return needs_grad(leaf.node) and val_of(feed).is_floating_point()


def _detach_unread(body: fx.GraphModule, program: RowProgram) -> None:
    """Detach outputs that get no gradient (metrics beside a loss), if any output gets one."""
    attached = [output.attached for output in program.outputs]
    end = body.graph.output_node()
    results: Any = end.args[0]
    with body.graph.inserting_before(end):
        made = tuple(
            result if keep or not any(attached) else body.graph.call_function(DETACH, (result,))
            for result, keep in zip(results, attached, strict=True)
        )
    end.args = (made,)
    body.recompile()


def _replace(
    gm: fx.GraphModule,
    emitter: RowEmitter,
    program: RowProgram,
    inputs: Feeds,
    tile: int,
    save_vectors: bool,
) -> int:
    """One program by a region; returns the bytes of the gradients that its forward makes."""
    body = body_graph(program.roots, [expr for expr, _, _ in inputs])
    _detach_unread(body, program)
    specs = [
        InputSpec(val_of(node), leaf.tiled, back and _is_trained(leaf, node))
        for (_, leaf, node), back in zip(inputs, differentiated(body), strict=True)
    ]
    rows = specs[0].example.shape[0]
    results = [  # a post-reduction has the dtype of its vocabulary part
        val_of(output.node).new_empty((rows, *output.value.local_sizes))
        for output in program.outputs
    ]
    feeds = [node for _, _, node in inputs]
    vectors = save_vectors and made_in_forward(body, specs, program.outputs)
    count = sum(output.attached for output in program.outputs) if vectors else 0
    region = Region(body, tuple(specs), "vectors" if vectors else "inputs")
    values = call_region(gm.graph, region, feeds, tile, results)
    for output, value in zip(program.outputs, values, strict=True):
        output.replace(emitter.builder, emitter.restore(value, output.value))
    trained = [feed for feed, spec in zip(feeds, specs, strict=True) if spec.needs_grad]
    return count * sum(map(nbytes, trained))
