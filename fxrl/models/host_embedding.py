"""Frozen embeddings whose tables lie in pinned host memory.

    model = fxrl.models.lora(load_model(...)[0])
    fxrl.models.offload_embeddings(model)
    step = fxrl.optimize(model, loss_fn)

A step looks a few thousand rows of a table up, and reads nothing else of it; its GiB on the GPU are
better spent on what layers keep. What is looked up has the same bits (``fxrl.ops.host_rows``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor, nn

from fxrl.models.hf import ModelError
from fxrl.models.quantized import Quantized
from fxrl.models.sharded import Sharded
from fxrl.ops.host_rows import host_rows, on_host


class HostEmbedding(nn.Embedding):
    """An embedding whose ``weight``, a parameter of the GPU like any other, lies in host memory;
    whatever moves, casts, copies or unpickles the module leaves it there."""

    def forward(self, input: Tensor) -> Tensor:
        """ids -> [*ids, embedding_dim]."""
        return host_rows(input, self.weight)  # type: ignore[no-any-return]

    def stay(self) -> None:
        """Move the table to the host, if it is on the GPU. Raises ``HostMemoryError``."""
        self.weight.data = on_host(self.weight.data)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse, by a ``ModelError``, to be trained in full, as PEFT's ``modules_to_save``
        asks."""
        if requires_grad:
            raise ModelError(
                "an embedding whose table lies in host memory is to be trained, and it is frozen; "
                "put an adapter beside it, or leave offload_embeddings out"
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.stay()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.stay()


def offload_embeddings(model: nn.Module) -> nn.Module:
    """Move the tables of a model's frozen embeddings to host memory, in place.

    Of a model on the CPU they move when it goes to a GPU. A table that is the output layer's weight
    as well stays where it is, and so do those in 8 or 4 bits or shared out over ranks. Not for a
    model whose weights are vLLM's. ``Config.host_memory`` is what layers may take beside them.

    Raises:
        ModelError: there is no such table, or it is trained.
        HostMemoryError: the host has too little memory that can be pinned.
    """
    found = [*_alone(model)]
    tables = [module for module in found if not module.weight.requires_grad]
    if not tables:
        why = "no embedding whose table nothing else computes with"
        if found:
            why = "only embeddings that are trained; freeze them (requires_grad_(False)) first"
        raise ModelError(f"embeddings cannot lie in host memory: the model has {why}")
    for module in tables:
        module.weight.data = on_host(module.weight.data)
        if not isinstance(module, HostEmbedding):
            module.__class__ = _hosting(type(module))
    return model


def held_on_host(model: nn.Module) -> int:
    """Bytes of a model's tables in host memory."""
    return sum(m.weight.nbytes for m in model.modules() if isinstance(m, HostEmbedding))


def _alone(model: nn.Module) -> Iterator[nn.Embedding]:
    """The embeddings whose weight no other module has."""
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or isinstance(module, (Quantized, Sharded)):
            continue
        if module.max_norm is None and names[id(module.weight)] == 1:
            yield module


def _hosting(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """The class that looks up as ``HostEmbedding`` does, and computes with it as ``kind`` does
    (Gemma scales what it has looked up)."""
    if kind is nn.Embedding:
        return HostEmbedding
    return type(kind.__name__, (kind, HostEmbedding), {"__module__": kind.__module__})
