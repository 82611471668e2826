"""The torch.compile backend: lower, run the passes, build the regions, hand the rest to AOT.

One call per captured graph. What happened is kept in a ``Capture`` for report, dump and verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from fxrl.compile.checkpointing import checkpoint_remarks, open_loss_checkpoints
from fxrl.compile.inductor import InductorOptions
from fxrl.compile.lower import lower
from fxrl.compile.record import GraphBreak, Stage
from fxrl.compile.regions import build_region
from fxrl.config import Config
from fxrl.core.graph import HigherOrderOperator
from fxrl.core.plan import Plan
from fxrl.core.printer import print_graph
from fxrl.core.region import Region, regions_of
from fxrl.core.remark import Remark, RemarkKind, Report
from fxrl.core.source import source_of_trace
from fxrl.passes import pipeline


@dataclass(slots=True)
class Capture:
    """One captured graph and what became of it.

    Attributes:
        dynamo: the graph as Dynamo delivered it.
        stages: the passes in order, with the printed graph before and after.
        regions: region bodies by id.
        aot: ``"forward"``, ``"backward"`` or ``"inference"`` -> AOT graph.
    """

    index: int
    dynamo: fx.GraphModule
    stages: list[Stage] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    aot: dict[str, fx.GraphModule] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    graph_breaks: list[GraphBreak] = field(default_factory=list)


class Backend:
    """A ``torch.compile`` backend bound to one configuration.

    Attributes:
        captures: what was captured so far, in order.
        only_explain: stop after the passes and run the graph as Dynamo delivered it (fake tensors).
    """

    def __init__(self, config: Config, plan: Plan, *, only_explain: bool = False) -> None:
        self.config = config
        self.plan = plan
        self.only_explain = only_explain
        self.captures: list[Capture] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        capture = Capture(len(self.captures), gm)
        self.captures.append(capture)
        capture.graph_breaks = _graph_breaks(gm)
        capture.report += _break_remarks(capture.graph_breaks)
        rewritten = self._rewrite(gm, capture)
        if rewritten is None or self.only_explain or _better_left(gm, capture):
            return gm.forward
        options = InductorOptions.of(self.config.inductor) if self.config.compile_regions else None
        for region in capture.regions.values():
            build_region(region, options)
        return self._run_by_aot(rewritten, example_inputs, capture)

    def _rewrite(self, gm: fx.GraphModule, capture: Capture) -> fx.GraphModule | None:
        """The graph after lowering and all passes; None when it must run as it is."""
        capture.report += checkpoint_remarks(gm)
        open_loss_checkpoints(gm)
        try:
            lowered = lower(gm, grad_enabled=torch.is_grad_enabled())
        except Exception as error:
            # NOTE [Why lowering may fail softly]: the graph can hold anything that PyTorch can.
            # What cannot be lowered runs as the user wrote it, and the report says so.
            reason = f"the graph could not be lowered: {type(error).__name__}: {error}"
            capture.report += _missed("capture", reason.splitlines()[0][:500])
            return None
        before = print_graph(lowered)
        for rewrite in pipeline(self.config.passes):
            report = rewrite.run(lowered, self.plan)
            after = print_graph(lowered)
            capture.stages.append(Stage(rewrite.name, before, after, report))
            capture.report += report
            before = after
        capture.regions = dict(regions_of(lowered))
        self._check_misses(capture)
        return lowered

    def _check_misses(self, capture: Capture) -> None:
        from fxrl.compile.misses import judge_misses

        judge_misses(capture.report, self.config.on_miss)

    def _run_by_aot(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], capture: Capture
    ) -> Callable[..., Any]:
        def keep(kind: str) -> Callable[..., Any]:
            def compiler(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
                capture.aot[kind] = graph
                return _boxed(graph)

            return compiler

        with torch._C._DisableAutocast():  # the lowered graph already holds autocast's casts
            compiled: Callable[..., Any] = aot_module_simplified(
                gm,
                list(example_inputs),
                fw_compiler=keep("forward"),
                bw_compiler=keep("backward"),
                inference_compiler=keep("inference"),
                partition_fn=_partition,
            )
        return compiled


def _better_left(gm: fx.GraphModule, capture: Capture) -> bool:
    """Whether the graph should run exactly as the user wrote it, op by op.

    NOTE [Why untouched graphs run eagerly]: where no pass applied there is nothing to gain, and
    after a graph break the user may differentiate with respect to this graph's results, which
    AOTAutograd's single backward node cannot serve. Higher-order ops (checkpointing) need AOT.
    """
    applied = capture.report.of_kind(RemarkKind.APPLIED)
    return not applied and not any(
        isinstance(node.target, HigherOrderOperator) for node in gm.graph.nodes
    )


def _boxed(graph: fx.GraphModule) -> Callable[..., Any]:
    """AOT's boxed convention: the callee empties the argument list, so inputs die early."""

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return graph.forward(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _partition(
    joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Save what eager would save; recompute only what the user's checkpointing asks for.

    NOTE [Why not min-cut everywhere]: the outer graph runs op by op, so each recomputed
    elementwise op costs a kernel and a pass over memory, which min-cut assumes to be free.
    """
    tagged = any(node.meta.get("recompute") is not None for node in joint.graph.nodes)
    split = min_cut_rematerialization_partition if tagged else default_partition
    result: tuple[fx.GraphModule, fx.GraphModule] = split(
        joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
    )
    return result


def _missed(pass_name: str, reason: str, cure: str = "", source: str = "") -> Report:
    return Report((Remark(RemarkKind.MISSED, pass_name, "graph", source, reason, cure),))


def _graph_breaks(gm: fx.GraphModule) -> list[GraphBreak]:
    """Why Dynamo ended this graph, if it was a break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return []
    trace = "".join(f'File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in reason.user_stack)
    return [GraphBreak(str(reason.reason).strip().splitlines()[0], source_of_trace(trace))]


def _break_remarks(breaks: Sequence[GraphBreak]) -> Report:
    return Report.of(
        Remark(
            RemarkKind.MISSED,
            "capture",
            "graph",
            found.source,
            f"graph break: {found.reason}",
            "move that code out of the loss, or write it with tensor ops",
        )
        for found in breaks
    )
