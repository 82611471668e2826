"""Writes into tensors, made functional, with autograd's view of each: recorded or not.

NOTE [Why a written tensor keeps its gradient]: what reads w after a write under no_grad, or through
``w.data``, gives its gradient to the w of before, whatever the write computed. So the new value n
is read as ``n.detach() + zero(w)``, where zero is 0 and has the derivative 1. Where w was infinite
or NaN the derivative is 0; there ``w - w.detach()`` alone would be NaN.

NOTE [Why by schema]: which arguments a call writes into is told by the ATen ops that it comes down
to. Names tell less: ``relu(w, inplace=True)``, ``clamp(..., out=w)``, ``embedding(max_norm=1)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxrl.analysis.saved_tensors import read_later
from fxrl.capture._torch import (
    FunctionalTensor,
    FunctionalTensorMode,
    TorchDispatchMode,
    from_functional,
    has_effects,
    storage_of,
    sync,
    tensors_in,
)
from fxrl.ir.graph import HigherOrderOperator, base_of, is_call, needs_grad
from fxrl.ir.remark import Refusal

aten = torch.ops.aten
#: ``x.data = y`` as Dynamo calls it, and as an op; the second of each from torch 2.15 on.
_GIVES: Any = getattr(aten, "shallow_copy_data_", None)
DATA_GIVEN = (torch.Tensor.set_, _GIVES)
_GIVES_DATA = (aten.set_.source_Tensor, getattr(_GIVES, "default", None))
#: They draw what their backward needs into an argument. Autograd takes that of the functional form
#: from before the draw (torch 2.11 to 2.15).
_DRAWING = (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)


class Functional(FunctionalTensorMode):  # type: ignore[no-untyped-call]
    """Functionalisation that knows which writes autograd does not see.

    Ops with an effect stay where they stand: ``torch.linalg`` checks so that a matrix had an
    inverse. PyTorch's own mode orders such ops by tokens; in this graph nothing is reordered, and
    none is dead.

    Attributes:
        differentiated: whether anything of the graph is.
        recording: whether autograd records what runs now.
        written_apart: the tensors beside autograd that were written into while it records.
    """

    def __init__(self, *, differentiated: bool) -> None:
        super().__init__()
        self.differentiated = self.recording = differentiated
        self.written_apart: list[FunctionalTensor] = []
        self._owners: dict[int, FunctionalTensor] = {}  # the first tensor of each storage
        # By id those that share the memory of another tensor, but not its gradient: ``x.detach()``,
        # ``x.data``, and views of these.
        self._apart: dict[int, FunctionalTensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_effects(func):
            plain = pytree.tree_map_only(FunctionalTensor, unwrap, (args, kwargs))
            result = func(*plain[0], **plain[1])
            return pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, result)
        if func in _GIVES_DATA:
            func, args = aten.copy_.default, _alike(*args)
            self._set_apart(args[0])
        if (
            func in _DRAWING and self.differentiated and any(arg is True for arg in args)
        ):  # training
            raise Refusal("the slopes that rrelu draws are lost to its backward", "use leaky_relu")
        unseen = self._unseen(func, args, kwargs) if self.differentiated else {}
        shared = args[0] if func.is_view and isinstance(args[0], FunctionalTensor) else None
        if shared is not None:
            self._owner(shared)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for owner, before in unseen.values():
            _write(owner, unwrap(owner).detach() + _zero(before))
        if shared is not None and (func is aten.detach.default or self.is_apart(shared)):
            self._set_apart(*pytree.tree_leaves(result))
        return result

    def is_apart(self, tensor: object) -> bool:
        """Whether a tensor shares the memory of another one, but not its gradient."""
        return id(tensor) in self._apart

    def detach(self, tensor: FunctionalTensor) -> None:
        """What ``tensor.detach_()`` does."""
        if not self.is_apart(tensor):
            owner = self._owner(tensor)
            _write(owner, unwrap(owner).detach())

    def _set_apart(self, *tensors: FunctionalTensor) -> None:
        self._apart |= {id(tensor): tensor for tensor in tensors}

    def _owner(self, tensor: FunctionalTensor) -> FunctionalTensor:
        """Of a view what it is a view of."""
        return self._owners.setdefault(storage_of(tensor), tensor)

    def _unseen(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[int, tuple[FunctionalTensor, torch.Tensor]]:
        """What a call will write into unseen by autograd, and what is there now."""
        found = {}
        for tensor in _written(func, args, kwargs):
            if not isinstance(tensor, FunctionalTensor):
                continue
            if self.recording and not self.is_apart(tensor):
                continue
            if self.recording:
                self.written_apart.append(tensor)
            if tensor.is_floating_point() or tensor.is_complex():
                owner = self._owner(tensor)
                found[id(owner)] = owner, unwrap(owner)
        return found


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors whose memory a call of an op writes into."""
    if torch.Tag.inplace_view in func.tags:  # ``x.unsqueeze_(0)`` looks at it otherwise
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(given)


def _alike(tensor: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if (tensor.dtype, tensor.device) != (data.dtype, data.device) or tensor.shape != data.shape:
        reason = f"a tensor of {tensor.dtype} is given data of another shape, dtype or device"
        raise Refusal(reason, "give it such data before the step is called")
    return tensor, data


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor - tensor.detach()).nan_to_num(0.0, 0.0, 0.0)


def _write(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    tensor.replace_(value)
    tensor.commit_update()


def unwrap(value: FunctionalTensor) -> torch.Tensor:
    """The value that a tensor has now, of the graph that is traced."""
    sync(value)
    return from_functional(value.elem)


def refuse_lost_values(graph: fx.Graph) -> None:
    """Refuse a write that autograd does not see into what it has kept for its backward.

    Eager autograd then differentiates with the new value (``w.data.mul_(0.9)`` behind a product
    with w), or says that it cannot (under no_grad). The functional graph would keep the old one.

    Raises:
        Refusal: there is one.
    """
    written = {base_of(old) for old in map(_old_of_write, graph.nodes) if old is not None}
    for node in _differentiated(graph) if written else ():
        whole = isinstance(node.target, HigherOrderOperator)
        if not written.isdisjoint(
            map(base_of, node.all_input_nodes if whole else read_later(node))
        ):
            reason = "what autograd keeps of this call is written into where autograd sees nothing"
            raise Refusal(reason, "write before the call, or into a clone", node)


def _differentiated(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls whose derivatives the graph's results take; not those that end under no_grad."""
    reached = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in reached and needs_grad(node):
            reached.update(node.all_input_nodes)
            yield node


def _old_of_write(node: fx.Node) -> fx.Node | None:
    """What stood where an unseen write's result stands: w of ``nan_to_num(w - w.detach())``."""
    if not is_call(node, aten.nan_to_num.default) or not is_call(node.args[0], aten.sub.Tensor):
        return None
    old, detached = node.args[0].args[:2]
    same = is_call(detached, aten.detach.default) and detached.args[0] is old
    return old if same and isinstance(old, fx.Node) else None


# ---------------------------------------------------------------------------- taken back
@contextmanager
def undone(args: Sequence[Any]) -> Iterator[None]:
    """Behind it, tensors hold what they held before, whatever was written into them."""
    writes = _Writes(args)
    try:
        with writes:
            yield
    finally:
        for tensor, values in writes.before:
            tensor.copy_(values)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies what is in tensors ahead of the first write into their memory."""

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, list[torch.Tensor]] = {}
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._held.setdefault(storage_of(arg), []).append(arg)
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _written(func, args, kwargs or {}):
            held = self._held.pop(storage_of(tensor), [])
            self.before += [(one, one.clone()) for one in held]
        return func(*args, **(kwargs or {}))
