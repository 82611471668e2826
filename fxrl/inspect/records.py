"""One capture as text: everything ``dump`` writes about it, rendered only when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from fxrl.compile.bodies.variants import CompiledRegion
from fxrl.compile.outer import aot_graphs
from fxrl.ir.capture_record import Capture, GraphBreak
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls, regions_of
from fxrl.ir.remark import Report


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass over one graph, in the stable printed form of ``ir.printer``."""

    name: str
    before: str
    after: str
    report: Report


@dataclass(slots=True)
class RegionRecord:
    """One distinct region body and what was made of it.

    Attributes:
        region_id: content hash of the body; equal bodies share it.
        sites: what calls this region: layers, or graph values.
        forward: printed forward graph.
        vjp: printed vector-Jacobian-product graph, empty without a gradient.
        generated: file name -> generated source (Inductor wrapper, Triton or C++), if compiled.
    """

    region_id: str
    sites: list[str]
    forward: str
    vjp: str
    generated: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class CaptureRecord:
    """Everything known about one captured graph.

    Attributes:
        index: running number, from 0.
        inputs: printed input signature, one line each (name, dtype, symbolic shape).
        dynamo: the graph as Dynamo delivered it, as readable code.
        stages: the passes in order, with the graph before and after each.
        regions: distinct region bodies of this capture.
        aot: ``"forward"``, ``"backward"``, ``"joint"`` or ``"inference"`` -> readable code.
        report: the remarks of all passes.
        graph_breaks: why the graph ended, if Dynamo broke it.
    """

    index: int
    inputs: str = ""
    dynamo: str = ""
    stages: list[Stage] = field(default_factory=list)
    regions: list[RegionRecord] = field(default_factory=list)
    aot: dict[str, str] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    graph_breaks: list[GraphBreak] = field(default_factory=list)


def record_of(capture: Capture) -> CaptureRecord:
    """All stages of one capture as text.

    AOTAutograd's graphs are made here, for reading: the step itself may run without them.
    """
    running = capture.rewritten.gm if capture.rewritten and capture.running else None
    graphs = {} if running is None else aot_graphs(running)
    return CaptureRecord(
        capture.index,
        inputs="\n".join(_input_lines(capture.dynamo)),
        dynamo=capture.dynamo.print_readable(print_output=False),
        stages=_stages(capture),
        regions=list(_regions(capture)),
        aot={name: graph.print_readable(print_output=False) for name, graph in graphs.items()},
        report=capture.report,
        graph_breaks=list(capture.graph_breaks),
    )


def _stages(capture: Capture) -> list[Stage]:
    """The passes run again, and watched."""
    stages: list[Stage] = []
    before = [""]

    def watch(name: str, gm: fx.GraphModule, report: Report) -> None:
        after = print_graph(gm)
        if name:
            stages.append(Stage(name, before[0], after, report))
        before[0] = after

    capture.replay(watch)
    return stages


def _input_lines(gm: fx.GraphModule) -> Iterator[str]:
    for line in print_graph(gm).splitlines():
        if " = input" in line and not line.startswith(" "):
            yield line


def _regions(capture: Capture) -> Iterator[RegionRecord]:
    """The regions as they were traced; as the pass outlined them where they were not built."""
    if capture.rewritten is None:
        return
    graph = capture.rewritten.gm
    sites: dict[str, list[str]] = {}
    for call in region_calls(graph):
        region = call.meta["region"]
        names = [region.layer] if region.layer else [user.name for user in call.users]
        sites.setdefault(region.id, []).extend(names)
    for name, region in regions_of(graph).items():
        callers = list(dict.fromkeys(sites[name]))
        built = capture.kernels.get(name)
        if not isinstance(built, CompiledRegion):
            yield RegionRecord(name, callers, print_graph(region.forward), "")
            continue
        forward, backward = built.traced.forward, built.traced.backward
        vjp = "" if backward is None else print_graph(backward)
        yield RegionRecord(name, callers, print_graph(forward), vjp, built.generated())
