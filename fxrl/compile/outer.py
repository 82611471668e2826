"""How the outer graph runs: what is left of the user's code once the regions are cut out.

NOTE [Why the outer graph runs under eager autograd]: it runs op by op either way, and eager
autograd saves what AOTAutograd's default partition saves. Tracing and partitioning the joint graph
would take long (8 layers with LoRA, 2 CPU cores: 26 s of a capture's 72 s), and longer for deeper
models. So the lowered forward is called as it is. AOTAutograd traces it for ``dump`` only, and
compiles it if a higher-order op needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fxrl.analysis.saved_tensors import read_later
from fxrl.capture._torch import RestartAnalysis
from fxrl.compile._torch import (
    aot_module_simplified,
    default_partition,
    donate_nothing,
    known_to_trace,
    min_cut_rematerialization_partition,
    without_autocast,
)
from fxrl.compile.bodies.flex import attach_flex
from fxrl.ir.bodies import (
    CALL_LAYER,
    CHECKPOINT,
    body_of,
    modules_of,
    what_it_saves,
    written_inputs,
)
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    HigherOrderOperator,
    as_node,
    base_of,
    inputs_of,
    is_loss_head,
    is_view,
    maker_of,
    needs_grad,
    relax_views,
)
from fxrl.ir.region import region_calls

aten = torch.ops.aten
#: The key of ``meta`` under which a checkpointed body says into which inputs it writes, and whether
#: a run for the backward stops once it has all that is needed.
_WRITES = "writes"


def run_outer(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A callable for a rewritten graph: eager autograd, or AOTAutograd if an op needs it."""
    attach_flex()
    _return_copies(gm.graph)
    for module in modules_of(gm):
        _keep_what_is_saved(module.graph)
        relax_views(module.graph)
    restore_checkpoints(gm)
    if calls_higher_order(gm) and not _writes_again(gm):
        return _with_sums(gm, compile_by_aot(gm, examples, {}))
    return _with_sums(gm, _without_autocast(gm))


def _return_copies(graph: fx.Graph) -> None:
    """Return copies of a loss head's results, so that the caller may write into them: autograd
    keeps a head's results, but not those of the gather that the user wrote."""
    returned = map(base_of, graph.output_node().all_input_nodes)
    for value in dict.fromkeys(returned):
        if is_loss_head(maker_of(value)) and needs_grad(value):
            with Builder(graph).after(value) as builder:
                copy = builder.call(aten.clone.default, value)
            value.replace_all_uses_with(copy)
            copy.args = (value,)


def _keep_what_is_saved(graph: fx.Graph) -> None:
    """Let ops that keep a value for the backward, before it is written into, read a copy.

    Otherwise autograd would refuse the backward. It does not in eager mode, where a batch norm
    updates its statistics unseen and an addition keeps no operand; but a layer that is recomputed
    keeps all of its inputs.
    """
    begins: dict[fx.Node, fx.Node] = {}
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written = base_of(as_node(write.args[0]))
        last = begins.get(written, written)
        readers = [user for user in written.users if last < user < write and _keeps(user, written)]
        begins[written] = write
        if readers:
            builder = Builder(graph)
            with builder.before(min(readers)):
                copy = builder.call(aten.clone.default, written)
            for reader in readers:
                reader.replace_input_with(written, copy)


def _keeps(reader: fx.Node, value: fx.Node) -> bool:
    """Whether ``value``, or a view of it, is kept for the backward."""
    if is_view(reader):
        return any(_keeps(user, reader) for user in reader.users)
    if isinstance(reader.target, HigherOrderOperator):
        return needs_grad(reader)
    return value in read_later(reader)


def calls_higher_order(gm: fx.GraphModule) -> bool:
    """Whether an op of the graph other than fxrl's own layer calls has a graph as its body."""
    own = (node.target for node in gm.graph.nodes if node.target is not CALL_LAYER)
    return any(isinstance(target, HigherOrderOperator) for target in own)


def _writes_again(gm: fx.GraphModule) -> bool:
    """Whether a backward writes because it runs a checkpointed body again. AOTAutograd would trace
    only the values of such a run; eager autograd runs higher-order ops, too, though some trace
    their gradient at each call."""
    return any(_WRITES in one.meta for one in gm.modules() if isinstance(one, fx.GraphModule))


def _with_sums(gm: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """Sum the gradients of marked inputs over the ranks that share sequences.

    NOTE [Why not in the graph]: passes know weights by being inputs of the graph. One op takes all
    of them, so its backward runs when all their gradients are there: one bucket, in ``backward()``
    itself, for every backward of an accumulation and for ``torch.autograd.grad``.
    """
    inputs = enumerate(inputs_of(gm.graph))
    marked = {i: node.meta["summed_over"] for i, node in inputs if "summed_over" in node.meta}
    if not marked:
        return run

    def summed(*args: Any) -> Any:
        given = [args[i] for i in marked]
        new = torch.ops.fxrl.sum_gradients(given, next(iter(marked.values())))
        places = dict(zip(marked, new, strict=True))
        return run(*(places.get(i, arg) for i, arg in enumerate(args)))

    return summed


def _without_autocast(gm: fx.GraphModule) -> Callable[..., Any]:
    """The lowered graph already holds the casts that autocast asked for."""

    def run(*args: Any) -> Any:
        with without_autocast():
            return gm.forward(*args)

    return run


def restore_checkpoints(gm: fx.GraphModule) -> None:
    """Turn Dynamo's checkpoint calls into non-reentrant ``torch.utils.checkpoint`` calls again."""
    for module in modules_of(gm):
        for node in module.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = body_of(module, node)
            if body is not None and (written := written_inputs(body)):
                # A region gives at once all that the backward needs, ahead of writes from inside.
                body.meta[_WRITES] = written, not region_calls(body)
                _write_early(body.graph)
            node.target = run_checkpointed
        module.recompile()


def _write_early(graph: fx.Graph) -> None:
    """Let a body write where the user's function does, not at its end: when it is run again, it is
    stopped as soon as all that the backward needs is there."""
    inputs = inputs_of(graph)
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        into, value = map(as_node, write.args[:2])
        before = [node for node in _readers(base_of(into)) if node < write]
        max([inputs[-1], into, value, *before]).append(write)


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, itself or through a view."""
    for user in value.users:
        yield user
        if is_view(user):
            yield from _readers(user)


def run_checkpointed(body: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """One checkpointed call, with the user's options except ``use_reentrant``: reentrant autograd
    gives the same numbers, but needs inputs that require grad and hides the body from autograd."""
    kept: dict[str, Any] = {"preserve_rng_state": bool(options.get("preserve_rng_state", True))}
    if (what_to_save := what_it_saves(body)) is not None:
        kept["context_fn"] = what_to_save
    # The user's function reads its weights by itself, and what it writes into. As arguments they
    # would have to stay as they are until the backward.
    written, ends_early = body.meta.get(_WRITES, ((), True))
    own = {i: arg for i, arg in enumerate(args) if i in written or isinstance(arg, nn.Parameter)}

    def run(*rest: Any) -> Any:
        others = iter(rest)
        return body(*(own[i] if i in own else next(others) for i in range(len(args))))

    rest = [arg for i, arg in enumerate(args) if i not in own]
    with nullcontext() if ends_early else set_checkpoint_early_stop(False):
        return checkpoint(run, *rest, use_reentrant=False, **kept)


def compile_by_aot(
    gm: fx.GraphModule, examples: Sequence[Any], graphs: dict[str, fx.GraphModule]
) -> Callable[..., Any]:
    """AOTAutograd over the graph, each half run op by op and kept in ``graphs`` by its name.

    No half writes into what was saved: a backward may run again (``retain_graph``).

    NOTE [Why not every example]: AOTAutograd would give symbolic sizes to the tensors of equal
    layers, which were not traced, and Dynamo knows no source from which to guard them.
    """
    given = [
        x
        if not isinstance(x, Tensor) or known_to_trace(x)
        else node.meta["val"].detach().requires_grad_(x.requires_grad)
        for x, node in zip(examples, inputs_of(gm.graph), strict=True)
    ]

    def keep(kind: str) -> Callable[..., Any]:
        def compiler(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            graphs[kind] = graph
            donate_nothing()
            return _boxed(graph)

        return compiler

    with without_autocast():
        compiled: Callable[..., Any] = aot_module_simplified(
            gm,
            given,
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            inference_compiler=keep("inference"),
            partition_fn=_partition,
        )
    return compiled


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
    forward, backward = split(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    _leave_checks(backward, {node.name for node in forward.graph.nodes})
    return forward, backward


def _leave_checks(backward: fx.GraphModule, made: Container[str]) -> None:
    """Remove from a backward what only the forward should do: checks, which a partition puts into
    both, and the random numbers that they are about, which would be drawn again."""
    for node in reversed(backward.graph.nodes):
        if node.op == "call_function" and not node.users and node.name in made:
            backward.graph.erase_node(node)
    backward.recompile()


def aot_graphs(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The graphs that AOTAutograd makes of a rewritten graph, for people to read; nothing runs."""
    pairs = [(node.meta["val"], needs_grad(node)) for node in inputs_of(gm.graph)]
    inputs = [x.detach().requires_grad_(mark) if isinstance(x, Tensor) else x for x, mark in pairs]
    graphs: dict[str, fx.GraphModule] = {}
    try:
        compile_by_aot(gm, inputs, graphs)
    except RestartAnalysis:  # it has noted which numbers are to be written in
        compile_by_aot(gm, inputs, graphs)
    return graphs
