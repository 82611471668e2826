"""Call each fused loss head once while its step is planned and compiled, to have its kernels ready.

NOTE [Why a call, and in a thread]: a head's kernels are compiled and loaded when it is first
called: about three seconds of a first step on an H200 in which nothing else happens, mostly in
NVRTC, LLVM and ptxas, which run without the GIL. A call for the same head, outputs and gradients
makes the kernels that the step will use. They do not depend on the number of rows, so a few rows of
zeros are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxrl.ir.graph import bound, inputs_of, needs_grad, val_of
from fxrl.ops.linear_logprob import LossHead
from fxrl.ops.linear_logprob.arguments import ForwardArguments
from fxrl.ops.linear_logprob.op import asked_of_forward

#: The smallest number of rows with which every route of the op can be taken.
_ROWS = 64


def begin_heads(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[[], None]:
    """Begin to call the graph's fused heads that are on a GPU; returns a function that waits.

    ``examples`` are the graph's inputs, as they are.
    """
    asked = [one for one in heads_of(gm, examples) if _is_on_gpu(one.head.weight)]
    if not asked:
        return lambda: None
    thread = threading.Thread(target=_run, args=(asked,), name="fxrl-heads", daemon=True)
    thread.start()
    return thread.join


def _is_on_gpu(weight: Tensor) -> bool:
    """Whether a tensor is on a GPU and has memory; gathered shards are freed between uses."""
    plain = type(weight) in (Tensor, nn.Parameter)
    return plain and weight.is_cuda and weight.untyped_storage().nbytes() >= weight.nbytes


def _run(asked: Sequence[ForwardArguments]) -> None:
    from fxrl.kernels.linear_logprob.cuda import run_both

    for one in asked:
        with suppress(Exception):  # the step's own call raises it again, where the user sees it
            run_both(one)


def heads_of(gm: fx.GraphModule, examples: Sequence[Any]) -> list[ForwardArguments]:
    """Arguments for a call of each fused head of a graph, with a few rows of zeros. Heads whose
    weight the graph computes are left out, for it does not exist yet."""
    given = dict(zip(inputs_of(gm.graph), examples, strict=False))
    op = torch.ops.fxrl.linear_logprob.default
    calls = gm.graph.find_nodes(op="call_function", target=op)
    return [_asked(call, given) for call in calls if call.args[1] in given]


def _asked(call: fx.Node, given: Mapping[fx.Node, Any]) -> ForwardArguments:
    made: Any = {
        name: _stand_in(name, value, given) if isinstance(value, fx.Node) else value
        for name, value in bound(call).items()
    }
    outputs, grad_outputs = made.pop("outputs"), made.pop("grad_outputs")
    del made["keep_exponentials"]  # what both ways compile is made ahead
    return asked_of_forward(LossHead(**made).on_one_device(), outputs, grad_outputs)


def _stand_in(name: str, value: fx.Node, given: Mapping[fx.Node, Any]) -> Tensor:
    """The weight itself; for other arguments a tensor like it, with a few rows of zeros."""
    if name == "weight":
        weight: Tensor = given[value]
        return weight
    like = val_of(value)
    shape = [size if isinstance(size, int) else _ROWS for size in like.shape]
    if name in ("hidden", "target", "row_mask"):
        shape[0] = _ROWS
    made = torch.zeros(shape, dtype=like.dtype, device=like.device)
    if name in ("temperature", "row_mask"):
        made.fill_(1)
    return made.requires_grad_(needs_grad(value) and made.is_floating_point())
