"""fxrl's own Inductor configuration, and the one place that calls Inductor.

The options are passed to each compile call and are never set globally: the user's own
torch.compile keeps its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

#: Options for every region body; each is kept only because a measurement pays for it
#: (bench/results/region_flags.json).
_BODY_OPTIONS: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class InductorOptions:
    """Inductor options of one kind of region.

    Attributes:
        options: ``torch._inductor.config`` names -> values, on top of Inductor's defaults.
    """

    options: tuple[tuple[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> InductorOptions:
        """fxrl's options for region bodies with the user's on top."""
        return cls(tuple(sorted({**_BODY_OPTIONS, **(extra or {})}.items())))


def compile_body(
    gm: fx.GraphModule, options: InductorOptions
) -> tuple[Callable[..., Sequence[Tensor]], str]:
    """Compile a traced graph with Inductor; also the source it generated.

    The graph's placeholders carry fake values; symbolic sizes stay symbolic, so the compiled body
    serves every token count of two or more.
    """
    import torch._inductor
    from torch._inductor.utils import run_and_get_code  # noqa: F401

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    compiled = torch._inductor.standalone_compile(
        gm, values, dynamic_shapes="from_graph", options={"config_patches": dict(options.options)}
    )
    return compiled, ""
