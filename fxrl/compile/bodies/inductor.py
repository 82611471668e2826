"""fxrl's own Inductor configuration, and the one place that calls Inductor.

The options are passed to each compile call and are never set globally: the user's own
torch.compile keeps its settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode

#: Options for every region body, spelled out so that nothing set globally leaks in.
#: NOTE [Why all of them are off]: measured on an H200 for a loss head, an MLP and a decoder layer
#: of Qwen3-8B's shape (bench/results/region_flags_*.json), none pays: tuned Triton GEMMs lose
#: 20-38 % to cuBLAS and take 10-48 s to compile, coordinate descent gains under 0.5 % for 3-12 s,
#: and CUDA graphs gain nothing behind an op whose tiles vary.
_BODY_OPTIONS: dict[str, Any] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
    # NOTE [Why not]: ``standalone_compile`` asks for it, and then runs every kernel where it is
    # compiled, over tensors of the batch's size that no plan knows of.
    "triton.autotune_at_compile_time": False,
    # NOTE [Why not]: Inductor multiplies matrices of few columns in wider ones and returns a part,
    # so what adapters of rank 2 keep had four times the bytes that were planned, and strides that
    # the backward was not compiled for: every step failed there.
    "shape_padding": False,
    # NOTE [Why not]: kernels run in the order of the graph, which is what the planner counts on.
    # Inductor takes one of four orders by peaks that leave out what attention allocates inside:
    # for Qwen2.5-3B's layer at 8192 tokens it took one with 126 MiB more (642 of 516). Locality
    # moves the weights' gradients to the graph's end, and keeps what they read until then: 352 MiB
    # in the backward of Qwen3-8B's layer at 8192 tokens.
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}


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

    @property
    def need_aot(self) -> bool:
        """Whether they ask for what is done on the way through AOTAutograd: the user's own passes,
        CUDA graphs."""
        names = [name for name, value in self.options if value]
        return any(part in name for part in ("custom", "pre_grad", "cudagraphs") for name in names)


def compile_body(
    gm: fx.GraphModule, mode: FakeTensorMode, options: InductorOptions, *, decomposed: bool = False
) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced graph with Inductor.

    Args:
        gm: functional; its placeholders carry fake values of ``mode``. Symbolic sizes stay
            symbolic, and what Inductor assumes about them becomes guards of the mode's shape
            environment.
        mode: the fake mode that ``gm`` was traced in.
        options: the configuration, for this call alone.
        decomposed: it was traced with Inductor's decompositions.
    """
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    build = _lowered if decomposed and not options.need_aot else _traced_again
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        return build(gm, values, mode, dict(options.options))


def _traced_again(
    gm: fx.GraphModule, values: list[Any], mode: FakeTensorMode, options: dict[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """By way of AOTAutograd, which decomposes the graph.

    NOTE [Why "from_tracing_context"]: "from_graph" looks for the mode under a key that only
    Dynamo's graphs have; on torch 2.11 it then makes a mode of its own and specialises the token
    count to its hint.
    """
    from torch._inductor import standalone_compile

    compiled: Callable[..., Sequence[Tensor]] = standalone_compile(
        gm, values, dynamic_shapes="from_tracing_context", options={"config_patches": options}
    )
    return compiled


def _lowered(
    gm: fx.GraphModule, values: list[Any], mode: FakeTensorMode, options: dict[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """As it is: AOTAutograd would trace it again, to find what it was traced to be.

    That took a third of the CPU time in which the halves of a decoder layer with LoRA were compiled
    (5.6 s, 3.7 s).
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    gm = copy.deepcopy(gm)  # Inductor changes it
    output = gm.graph.output_node()
    results: Any = output.args[0]  # whose strides are told, and so must stay
    visible = [i for i, result in enumerate(results) if isinstance(result, fx.Node)]
    output.meta["user_visible_output_idxs"] = visible
    first: dict[str, Any] = {"post_grad_custom_pre_pass": _JointPasses()}
    with V.set_fake_mode(mode), config.patch(first | options):
        compiled: Any = compile_fx_inner(gm, values, is_inference=True)
    return lambda *args: compiled(list(args))


class _JointPasses(CustomGraphPass):
    """What AOTAutograd lets Inductor do to a graph before it is lowered.

    NOTE [Why by a hook]: it runs only where the cache has nothing. The first run of these passes
    makes all their patterns, a second of CPU time, and a second process needs none of them.
    """

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        inputs = (node.meta["val"] for node in graph.find_nodes(op="placeholder"))
        device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
        assert graph.owning_module is not None
        joint_graph_passes(graph.owning_module, device)

    def uuid(self) -> str:
        return "joint graph passes"


def start_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels, and do not wait for them.

    NOTE [Why early]: ``torch.compile(backend="inductor")`` does the same; a compile call of its own
    does not. Until they are up, kernels are compiled in this process, one after the other.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def generated_source(compiled: object) -> str:
    """The source that Inductor generated for a compiled body: the wrapper, kernels inside.

    NOTE [Why a walk]: the artifact keeps its code inside a chain of wrappers whose names change
    between versions of torch; the output code at the end of the chain is stable.
    """
    return "\n\n".join(sorted({code.source_code for code in _output_codes(compiled, set())}))


def _output_codes(value: Any, seen: set[int]) -> Iterator[Any]:
    from torch._inductor.output_code import CompiledFxGraph

    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, CompiledFxGraph):
        yield value
        return
    inside = [*getattr(value, "__dict__", {}).values()]
    for cell in getattr(value, "__closure__", None) or ():
        try:
            inside.append(cell.cell_contents)
        except ValueError:  # a name that its function has not bound yet
            continue
    for item in inside:
        if callable(item):
            yield from _output_codes(item, seen)
