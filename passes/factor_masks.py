"""Give attention what its mask is computed from, so that no mask is materialised.

    %mask = bitwise_and(le(%key, %query), eq(%doc, %doc_of_keys))       [B, 1, T, T]
    %out  = scaled_dot_product_attention(%q, %k, %v, attn_mask=%mask)
becomes
    %blocks = fxrl.mask_blocks([%doc, %doc_of_keys], "bitwise_and(le(key, query), eq(v0, v1))")
    %out    = fxrl.masked_attention(%q, %k, %v, [%doc, %doc_of_keys], %blocks, "...")

This works for padding, packed documents, windows, chunks, prefixes: any mask whose entry is
computed from one query's values and one key's. Which blocks of 128 queries and keys have anything
to see is found once for all layers under the mask. Empty blocks cost nothing, so packed documents
cost the squares of their lengths, and a window costs its band. Results are those of the dense mask.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxrl.analysis.attention import before_repeat, calls_by_mask, data_of, options_of
from fxrl.analysis.masks import Axes, FactoredMask, factored, is_square
from fxrl.config import Config
from fxrl.ir.bodies import Lender
from fxrl.ir.build import Builder
from fxrl.ir.graph import as_node, nbytes, shape_of, val_of
from fxrl.ir.graph_pass import Applied, Miss, Pass, PassDoc, Site
from fxrl.ir.plan import Choice, Keep, Rewrite
from fxrl.ir.remark import Refusal, format_bytes
from fxrl.ir.sizes import SizeTable
from fxrl.ops.masked_attention import can_be_fast, expression

aten = torch.ops.aten

#: Bytes of a mask from which computing it pays. On a CPU the dense mask is faster (PyTorch's kernel
#: against one in tiles), so there it is memory alone that counts. On a GPU: forward and backward of
#: one layer of Qwen3-8B's shape on an H200, beside cuDNN under the dense mask; 8 documents of 2048
#: tokens in all (4 MiB) 1.4 ms of 0.9, 8 rows of 2048 padded on the left (32 MiB) 2.2 of 6.4,
#: 8 documents of 16384 in all (256 MiB) 3.0 of 50.
_LEAST_MASK = {"cpu": 2**30, "meta": 2**24, "cuda": 2**24}


@dataclass(frozen=True, slots=True)
class MaskSite(Site):
    """A mask, what it is computed from, and the attention calls that read it, once for each run."""

    mask: FactoredMask
    readers: tuple[fx.Node, ...]


@dataclass(frozen=True)
class FactorMasks(Pass[MaskSite]):
    """Replace attention under dense masks by ``fxrl::masked_attention``.

    Attributes:
        least_mask: device type -> bytes of a mask below which it stays.
    """

    least_mask: Mapping[str, int] = field(default_factory=dict)

    name = "factor-masks"
    doc = PassDoc(
        "`scaled_dot_product_attention` under a mask that is computed from vectors: padding, "
        "packed documents (`position_ids` that begin again), sliding windows, chunks, prefixes",
        "the `[B, 1, T, T]` mask, and the work for blocks of queries and keys that do not see each "
        "other (FlexAttention)",
        "a kernel's compilation; more time for each pair that is seen than cuDNN takes",
        "the mask is given dense, adds numbers to the scores, is small, or attention has dropout",
    )

    @classmethod
    def of(cls, config: Config) -> FactorMasks:
        """Masks too small to pay are left alone, unless the configuration asks for the pass."""
        return cls() if cls.name in (config.passes or ()) else cls(dict(_LEAST_MASK))

    def match(self, gm: fx.GraphModule) -> Iterator[MaskSite | Miss]:
        for mask, calls in calls_by_mask(gm).items():
            if not is_square(mask):
                continue
            try:
                _check(gm, mask, calls)
                made = factored(mask)
                _try(made, mask)
                yield MaskSite(mask, nbytes(mask), made, tuple(calls))
            except Refusal as refusal:
                reason = f"{len(calls)} attention calls keep their mask: {refusal.reason}"
                loses = nbytes(mask) >= self._least(mask)
                yield Miss(calls[0], Refusal(reason, refusal.cure, refusal.at), loses)

    def decide(self, site: MaskSite) -> Choice:
        """A mask that is too small stays; that is no miss."""
        least = self._least(site.anchor)
        if site.saved_bytes >= least:
            return Rewrite(self.name)
        have = f"{format_bytes(site.saved_bytes)}, below {format_bytes(least)}"
        return Keep(f"the mask has {have}, from where it pays on this device", missed=False)

    def _least(self, mask: fx.Node) -> int:
        return self.least_mask.get(val_of(mask).device.type, 0)

    def rewrite(self, gm: fx.GraphModule, site: MaskSite, choice: Choice) -> Applied:
        mask, text = site.anchor, site.mask.text
        with Builder(mask.graph).before(mask) as build:
            sizes = SizeTable(mask.graph)
            vectors = [_laid_out(build, *vector) for vector in site.mask.vectors]
            counts = [sizes.arg(size, mask) for size in shape_of(mask)[-2:]]
            device = val_of(mask).device
            blocks = _parts(
                build, torch.ops.fxrl.mask_blocks.default, vectors, text, *counts, device
            )
        lender = Lender(gm)
        for call in dict.fromkeys(site.readers):
            lent = [lender.to(call.graph, value) for value in (*vectors, *blocks)]
            _replace(call, lent, len(vectors), text)
        given = (data_of(vector) for vector, _ in site.mask.vectors)
        names = "".join(f", v{n} from {name}" for n, name in enumerate(given) if name)
        what = f"{len(site.readers)} attention calls compute their mask: {text}{names}"
        return Applied(what, site.saved_bytes)


def _try(made: FactoredMask, mask: fx.Node) -> None:
    values = {
        f"v{number}": torch.empty(1, 1, 1, 1, dtype=val_of(vector).dtype, device="meta")
        for number, (vector, _) in enumerate(made.vectors)
    }
    values["query"], values["key"] = (
        torch.empty(size, dtype=torch.int64, device="meta") for size in ((2, 1), (2,))
    )
    try:
        dtype = expression(made.text)(values).dtype
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = f"its expression {made.text} cannot be computed: {error}".splitlines()[0]
        raise Refusal(why, at=mask) from None
    if dtype != torch.bool:
        raise Refusal(f"its expression {made.text} gives {dtype}, no bools", at=mask)


def _check(gm: fx.GraphModule, mask: fx.Node, calls: Sequence[fx.Node]) -> None:
    if mask.op == "placeholder" and mask.graph is not gm.graph:
        raise Refusal("layers that are one graph are given different masks", at=mask)
    for call in calls:
        if options_of(call).get("dropout_p"):
            raise Refusal("attention has dropout", at=call)
        query, _, value = map(val_of, map(as_node, call.args[:3]))
        if query.is_cuda and not can_be_fast(query, value):
            kind = f"heads of {value.shape[-1]} features in {query.dtype}"
            raise Refusal(f"FlexAttention has no kernel for {kind}", at=call)
        if query.dim() != 4:
            raise Refusal("attention is not over [batch, heads, tokens, features]", at=call)


def _laid_out(build: Builder, node: fx.Node, axes: Axes) -> fx.Node:
    """A vector as [batch, head, query, key], each dim of its own size or of size 1."""
    narrow = [dim for dim, axis in enumerate(axes) if axis is None]
    wide = [axis for axis in axes if axis is not None]
    if len(axes) == 4 and all(axis in (None, dim) for dim, axis in enumerate(axes)):
        return node
    if narrow:
        node = build.call(aten.squeeze.dims, node, narrow)
    if wide != sorted(wide):
        node = build.call(aten.permute.default, node, [wide.index(axis) for axis in sorted(wide)])
    for axis in range(4):
        if axis not in wide:
            node = build.call(aten.unsqueeze.default, node, axis)
    return node


def _parts(build: Builder, target: Any, *args: Any) -> list[fx.Node]:
    """The parts of a result of several tensors."""
    call = build.call(target, *args)
    return [build.call(operator.getitem, call, index) for index in range(len(call.meta["val"]))]


def _replace(call: fx.Node, lent: list[fx.Node], vectors: int, text: str) -> None:
    query, key, value = map(as_node, call.args[:3])
    ungrouped = before_repeat(key), before_repeat(value)
    if None not in ungrouped:
        key, value = map(as_node, ungrouped)
    scale = options_of(call).get("scale")
    scale = float(shape_of(query)[-1]) ** -0.5 if scale is None else float(scale)
    with Builder(call.graph).before(call) as build:
        given = (query, key, value, lent[:vectors], lent[vectors:], text, scale)
        out = _parts(build, torch.ops.fxrl.masked_attention.default, *given)[0]
    out.meta = {**call.meta, "val": out.meta["val"]}
    call.replace_all_uses_with(out)
    call.graph.erase_node(call)
