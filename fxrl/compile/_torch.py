"""All private names of torch that ``fxrl.compile`` uses, and what each is for.

``fxrl.capture._torch`` is the same for capturing, and says in which versions they were seen.
Inductor is imported only where a function needs it: that takes a second, and a step on a CPU may
not need it.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call, union-attr"
# ruff: noqa: E501, I001  # a name and its purpose stand on one line
from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs

# fmt: off
import torch
import torch._functorch.config
import torch.fx._lazy_graph_module
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_module_simplified as aot_module_simplified  # forward and backward as graphs
from torch._functorch.partitioners import default_partition as default_partition  # saves what eager saves
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxrl.capture._torch import FakeTensorMode
from fxrl.ir.graph import Size, inputs_of
from fxrl.scoped import swapped

functorch_config: Any = torch._functorch.config  # .patch: how min-cut weighs, for the time of a call
without_autocast: Any = torch._C._DisableAutocast  # a context: a lowered graph already holds its casts
without_saved_tensors_hooks: Any = torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing  # a context: the user's hooks are for values, not for what is traced
new_graph_module: Callable[..., fx.GraphModule] = torch.fx._lazy_graph_module._make_graph_module  # as make_fx makes it: while torch compiles, its code is written when it first runs
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # retain_graph of the backward at hand

# fmt: on


def donate_nothing() -> None:
    """The backward that AOTAutograd is compiling now writes into nothing that was saved for it, so
    it may run twice. (The config for this is read in the backward, too, so a patch is no use.)"""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


# ---------------------------------------------------------------------------- sizes that vary
def known_to_trace(tensor: Tensor) -> bool:
    """Whether the current trace has seen it and knows where each call finds it; true without one."""
    context = torch._guards.TracingContext.try_get()
    return context is None or tensor in context.tensor_to_context


def symbolic_mode() -> FakeTensorMode:
    """Fake tensors whose sizes may vary, in a shape environment of their own."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=False)


def new_size(mode: FakeTensorMode, name: str, example: int) -> Size:
    """A new symbol of the mode with ``example`` as its hint, which must not be 0 or 1."""
    if example < 2:
        return example
    source = ConstantSource(f"fxrl_{name}")
    symbol = mode.shape_env.create_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size: Size = mode.shape_env.create_symintnode(symbol, hint=example, source=source)
    return size


def size_of(mode: FakeTensorMode, expr: Any) -> Size:
    """A size by its expression in symbols of the mode."""
    size: Size = mode.shape_env.create_symintnode(expr, hint=None)
    return size


def values_of(sizes: Mapping[str, Size], given: Mapping[str, int]) -> dict[Any, Any]:
    """Symbol -> number, for those ``sizes`` that are symbols and for which a number is given."""
    return {
        size.node._expr: sympy.Integer(given[name])
        for name, size in sizes.items()
        if isinstance(size, torch.SymInt) and name in given
    }


def guards_of(mode: FakeTensorMode) -> Sequence[Any]:
    """The guards on sizes that graphs traced in ``mode`` assume."""
    return mode.shape_env.guards


def holds(mode: FakeTensorMode, sizes: Mapping[str, Size], given: Mapping[str, int]) -> bool:
    """Whether graphs traced in ``mode`` with the symbols ``sizes`` hold for these numbers."""
    known = [(size, given[name]) for name, size in sizes.items() if name in given]
    if any(n != size if isinstance(size, int) else n < 2 for size, n in known):
        return False
    values = values_of(sizes, given)
    return all(guard.expr.xreplace(values) != sympy.false for guard in guards_of(mode))


# ---------------------------------------------------------------------------- Inductor
@contextmanager
def _given(gm: fx.GraphModule, mode: FakeTensorMode) -> Iterator[list[Any]]:
    """The inputs of a graph traced in ``mode``; assumptions go into the mode's shape environment."""
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        yield [node.meta["val"] for node in inputs_of(gm.graph)]


def inductor_compile(
    gm: fx.GraphModule, mode: FakeTensorMode, options: Mapping[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """A graph traced in ``mode``, compiled with these options and no others, by way of AOTAutograd,
    which decomposes it.

    NOTE [Why "from_tracing_context"]: "from_graph" looks for the mode under a key that only
    Dynamo's graphs have; on torch 2.11 it then makes a mode of its own and specialises the token
    count to its hint.
    """
    from torch._inductor import standalone_compile

    with _given(gm, mode) as values, _grouped_matrices_as_traced():
        compiled: Callable[..., Sequence[Tensor]] = standalone_compile(
            gm,
            values,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": dict(options)},
        )
    return compiled


def inductor_lower(
    gm: fx.GraphModule, mode: FakeTensorMode, options: Mapping[str, Any]
) -> Callable[[], Callable[..., Sequence[Tensor]]]:
    """The same for a functional graph of Inductor's own ops, which is lowered as it is. Returns at
    once, with what waits for its kernels and gives the compiled graph.

    AOTAutograd would trace it again and get the same graph: a third of the CPU time for compiling
    the halves of a decoder layer with LoRA (5.6 s with it, 3.7 s without).
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V

    gm = copy.deepcopy(gm)  # Inductor changes it
    output = gm.graph.output_node()
    results: Any = output.args[0]  # whose strides are told, and so must stay
    output.meta["user_visible_output_idxs"] = [
        i for i, result in enumerate(results) if isinstance(result, fx.Node)
    ]
    given = {"post_grad_custom_pre_pass": _JointPasses(), **options}
    kernels = _KernelsToCome()
    with (
        _given(gm, mode) as values,
        V.set_fake_mode(mode),
        config.patch(given),
        _as_traced(gm, mode),
        _grouped_matrices_as_traced(),
        kernels.left_to_finish(),
    ):
        compiled: Any = compile_fx.compile_fx_inner(gm, values, is_inference=True)

    def finished() -> Callable[..., Sequence[Tensor]]:
        with _given(gm, mode), V.set_fake_mode(mode), config.patch(given):
            kernels.finish()
        return lambda *args: compiled(list(args))

    return finished


class _KernelsToCome:
    """The kernels of one lowered graph, which other processes compile.

    NOTE [Why not wait at once]: the module that Inductor writes waits for its kernels where it is
    loaded, before the next graph is lowered, and this process would sit idle meanwhile. A cache
    entry holds the kernels, so it is written when they are there, too.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, dict[str, Any]]] = []  # modules' names, kernels to come
        self._unsaved: list[tuple[Any, ...]] = []

    @contextmanager
    def left_to_finish(self) -> Iterator[None]:
        """Inside, and in this thread, a graph is lowered and loaded without its kernels."""
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import FxGraphCache

        own = threading.get_ident()
        compiler: Any = AsyncCompile
        cache: Any = FxGraphCache
        wait, save = compiler.wait, cache._save_graph

        def waits(compiling: Any, scope: dict[str, Any]) -> None:
            if threading.get_ident() == own:
                self._waiting.append((compiling, scope))
            else:
                wait(compiling, scope)

        def saves(key: str, graph: Any, *rest: Any) -> None:
            if threading.get_ident() == own:
                kept = copy.copy(graph)  # what runs is changed by what is next
                kept.prepare_for_serialization()
                self._unsaved.append((key, kept, *rest))
            else:
                save(key, graph, *rest)

        compiler.wait, cache._save_graph = waits, staticmethod(saves)
        try:
            yield
        finally:
            compiler.wait, cache._save_graph = wait, staticmethod(save)

    def finish(self) -> None:
        """Wait for the kernels, and let the cache have the graph."""
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import FxGraphCache
        from torch._inductor.triton_bundler import TritonBundler

        TritonBundler.begin_compile()
        try:
            for compiling, scope in self._waiting:
                AsyncCompile.wait(compiling, scope)
            bundle, _ = TritonBundler.collect()
        finally:
            TritonBundler.end_compile()
        for key, graph, *rest in self._unsaved:
            graph.set_triton_bundle(bundle)
            FxGraphCache._save_graph(key, graph, *rest)
        self._waiting, self._unsaved = [], []


def _as_traced(gm: fx.GraphModule, mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Inductor takes the fake values that a graph was traced with instead of computing them again,
    which takes a twentieth of a cold first step."""
    from torch._inductor import compile_fx

    run: Any = compile_fx.fake_tensor_prop

    def known(given: fx.GraphModule, *args: Any) -> FakeTensorMode:
        told = given is gm and all(
            "val" in node.meta for node in gm.graph.nodes if node.op != "output"
        )
        return mode if told else run(given, *args)

    return swapped(compile_fx, fake_tensor_prop=known)


@contextmanager
def _grouped_matrices_as_traced() -> Iterator[None]:
    """Grouped products get their matrices in the memory layout that they were traced with.

    NOTE [Why Inductor must be told]: it chooses layouts freely, and asks only that this op's
    operands be dense. The op refuses a matrix with neither contiguous rows nor contiguous columns,
    and a copy of such a matrix is one, too.
    """
    from torch._inductor import lowering

    constraints: dict[Any, Any] = lowering._maybe_layout_constraints
    op = torch.ops.aten._grouped_mm.default
    before = constraints.get(op)
    constraints[op] = lowering.constrain_to_fx_strides
    try:
        yield
    finally:
        constraints[op] = before


class _JointPasses(CustomGraphPass):
    """Inductor's passes over a joint graph, run before it is lowered.

    NOTE [Why by a hook]: it runs only where the cache has nothing. The first run of these passes
    makes all their patterns, a second of CPU time, and a second process needs none of them.
    """

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        inputs = (node.meta["val"] for node in inputs_of(graph))
        device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
        assert graph.owning_module is not None
        joint_graph_passes(graph.owning_module, device)

    def uuid(self) -> str:
        return "joint graph passes, grouped matrices as traced"


def inductor_decompositions() -> Any:
    """Op -> what Inductor computes it by, as ``make_fx`` takes it."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def marking_roundings() -> AbstractContextManager[object]:
    """``make_fx`` inside marks the ops whose results eager rounds, for Inductor's
    ``emulate_precision_casts``."""
    from torch._inductor import config

    marking: AbstractContextManager[object] = config.patch(emulate_precision_casts=True)
    return marking


def inductor_cache_folder() -> Path | None:
    """Where Inductor keeps the graphs that it compiled; None where it is told to keep none."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    kept = config.fx_graph_cache and not config.force_disable_caches
    return Path(cache_dir()) if kept else None


def inductor_settings() -> bytes:
    """A hash of all of Inductor's settings."""
    from torch._inductor import config

    return config.get_hash()


def inductor_kinds() -> dict[str, Any]:
    """The options that Inductor has, by name, and the type of each."""
    from torch._inductor import config

    return {name: config.get_type(name) for name in config._config}


def start_inductor_workers() -> None:
    """Start the processes in which Triton kernels are compiled, and do not wait for them.

    NOTE [Why early]: ``torch.compile(backend="inductor")`` starts them early, too, but a direct
    compile call does not. Until they are up, kernels are compiled in this process, one by one.

    NOTE [Why a thread]: two things are needed once in a process and run without the GIL: a checksum
    of Triton's library for cache keys (0.4 s), and the C compiler if no cache has Triton's own
    module (0.4 s).
    """
    from torch._inductor.async_compile import maybe_warm_pool
    from torch._inductor.runtime.triton_compat import HAS_TRITON

    maybe_warm_pool()
    if HAS_TRITON:
        threading.Thread(target=_ask_triton, name="fxrl-triton", daemon=True).start()


def _ask_triton() -> None:
    from torch._inductor.runtime.triton_compat import triton, triton_key

    triton_key()
    with suppress(Exception):  # who needs the driver asks again, and is told what is wrong
        _ = triton.runtime.driver.active


def inductor_source(value: object) -> str | None:
    """The code that Inductor wrote, if ``value`` is the object that holds it."""
    from torch._inductor.output_code import CompiledFxGraph

    return value.source_code if isinstance(value, CompiledFxGraph) else None
