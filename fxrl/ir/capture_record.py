"""What one capture leaves behind for people: every stage as text, ready to dump.

The backend fills a record while it compiles; ``report``, ``dump`` and ``verify`` only read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
        sites: graph values whose rewrite calls this region.
        forward: printed forward graph.
        vjp: printed vector-Jacobian-product graph, empty without a gradient.
        generated: file name -> generated source (Inductor wrapper, Triton or C++), if compiled.
    """

    region_id: str
    sites: list[str]
    forward: str
    vjp: str
    generated: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo stopped a graph: the reason in its words and the user's ``file:line``."""

    reason: str
    source: str


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
