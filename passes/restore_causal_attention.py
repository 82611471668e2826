"""Tell attention that its mask is the causal one, so that no mask is materialised.

    %mask = le(%key_positions, %query_positions)         [1, 1, T, T], by arange
    %out  = scaled_dot_product_attention(q, k, v, attn_mask=%mask)
becomes
    %out  = scaled_dot_product_attention(q, k, v, is_causal=True)

In eager mode libraries look at the mask's data to decide. Tracing cannot, so they give attention a
dense mask, and the fused kernels run without their causal shortcut (H200, Qwen3-8B shape with
2176 tokens a row: 7 of 56 ms of a layer's update). Here causality is proven from how the mask is
computed; a mask that depends on data (padding, packed positions) or has a window stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxrl.analysis.attention import calls_by_mask, data_of, set_options
from fxrl.analysis.masks import is_causal
from fxrl.ir.graph import nbytes
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal, RemarkKind


@dataclass(frozen=True, slots=True)
class CausalMask(Site):
    """A mask proven to be causal, and the attention calls that read it."""

    readers: tuple[fx.Node, ...]


@dataclass(frozen=True)
class RestoreCausalAttention(Normalisation[CausalMask]):
    """Replace proven causal masks by ``is_causal=True``.

    NOTE [Why a mask that stays is no miss]: it is what the batch asks for, and nothing that a user
    of padded or packed batches could mend; the report says it as a fact.
    """

    name = "restore-causal-attention"
    applied = RemarkKind.APPLIED
    doc = PassDoc(
        "`scaled_dot_product_attention` under a mask that is provably `key <= query`, from how it "
        "is computed",
        "the mask; the fused kernels' causal shortcut comes back (tracing made the library build a "
        "dense mask)",
        "nothing",
        "the mask involves data (padding, packed positions) or a window: it stays",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[CausalMask | Miss]:
        for mask, calls in calls_by_mask(gm).items():
            if is_causal(mask):
                yield CausalMask(mask, nbytes(mask), tuple(calls))
            else:
                yield Miss(calls[0], _why_it_stays(mask, len(calls)))

    def respell(self, gm: fx.GraphModule, site: CausalMask) -> Applied:
        for call in site.readers:
            set_options(call, attn_mask=None, is_causal=True)
        what = f"{len(site.readers)} attention calls use is_causal instead of a mask"
        return Applied(what, site.saved_bytes)


def _why_it_stays(mask: fx.Node, count: int) -> Refusal:
    data = data_of(mask)
    stay = f"{count} attention calls are under another mask: "
    if data is None:
        return Refusal(f"{stay}it is not plainly causal")
    return Refusal(
        f"{stay}it depends on the values of {data}",
        "leave out attention_mask and position_ids where no token is padding",
    )
