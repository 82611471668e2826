"""From a capture to text: everything ``dump`` writes about it, rendered only when asked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxrl.compile.backend import Capture
from fxrl.compile.outer import aot_graphs
from fxrl.ir.capture_record import CaptureRecord, RegionRecord
from fxrl.ir.printer import print_graph
from fxrl.ir.region import Region
from fxrl.ops.region import registered

_CALLS = ("fxrl.region.default", "fxrl.kept_region.default")


def record_of(capture: Capture) -> CaptureRecord:
    """All stages of one capture as text.

    AOTAutograd's graphs are made here, for reading: the step itself may run without them.
    """
    running = capture.rewritten
    graphs = {} if running is None else aot_graphs(running)
    sites = {} if running is None else _sites(running.graph)
    return CaptureRecord(
        capture.index,
        inputs="\n".join(_input_lines(capture.dynamo)),
        dynamo=capture.dynamo.print_readable(print_output=False),
        stages=list(capture.stages),
        regions=[_region(r, sites.get(r.id, [])) for r in capture.regions.values()],
        aot={name: graph.print_readable(print_output=False) for name, graph in graphs.items()},
        report=capture.report,
        graph_breaks=list(capture.graph_breaks),
    )


def _input_lines(gm: fx.GraphModule) -> Iterator[str]:
    for line in print_graph(gm).splitlines():
        if " = input" in line and not line.startswith(" "):
            yield line


def _sites(graph: fx.Graph) -> dict[str, list[str]]:
    """Region id -> names of the values that its calls give."""
    found: dict[str, list[str]] = {}
    owner = graph.owning_module
    bodies = [m.graph for m in owner.children() if isinstance(m, fx.GraphModule)] if owner else []
    for node in (node for g in (graph, *bodies) for node in g.nodes):
        if node.op == "call_function" and str(node.target) in _CALLS:
            names = [user.name for user in node.users] or [node.name]
            found.setdefault(str(node.args[1]), []).extend(names)
    return found


def _region(region: Region, sites: list[str]) -> RegionRecord:
    """The region as the backend traced it; as the pass outlined it where it was not built."""
    kernels = registered(region.id)
    if kernels is None or kernels.traced is None:
        return RegionRecord(region.id, sites, print_graph(region.forward), "")
    forward, vjp = kernels.traced
    return RegionRecord(
        region.id,
        sites,
        print_graph(forward),
        "" if vjp is None else print_graph(vjp),
        kernels.generated(),
    )
