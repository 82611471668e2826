"""What runs for a region, and how the op finds it: by a key made of content and options.

NOTE [Why keys and not objects]: an op's schema has no objects. ``_LIVE`` holds kernels weakly: they
belong to the captures that run them, and to the backward passes that still need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fxrl.ir.graph import Size, val_of
from fxrl.ir.region import Region
from fxrl.ir.sizes import BoundSizes

TensorFunction = Callable[..., Sequence[Tensor]]
Strides = tuple[int, ...]
Source = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Later:
    """What runs behind a region's forward: as traced, with sizes that are symbols, or compiled."""

    function: TensorFunction
    # Where each argument is from: ``("input", i)``, ``("output", i)`` (kept values count on),
    # ``("grad", i)`` or ``("size", i)``.
    sources: tuple[Source, ...]
    sizes: tuple[Size, ...]  # the integers among the arguments

    @property
    def read(self) -> tuple[Source, ...]:
        """The sources that are inputs and outputs of the forward."""
        return tuple(source for source in self.sources if source[0] in ("input", "output"))

    def __call__(self, kept: Sequence[Tensor], grads: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Run with the values that ``read`` names, in order."""
        queue = iter(kept)
        return self.function(
            *(
                grads[i] if kind == "grad" else self.sizes[i] if kind == "size" else next(queue)
                for kind, i in self.sources
            )
        )


@dataclass(frozen=True, slots=True)
class Body:
    """What runs for a region at one set of sizes."""

    forward: TensorFunction  # inputs -> outputs, then the values kept for the backward
    backward: Later | None  # -> gradients of the inputs that need one; None where none does
    num_outputs: int  # outputs of the region itself
    num_kept: int = 0  # values that it keeps
    again: Later | None = None  # -> outputs, of what is kept; None where nobody asks for them
    # Strides that the halves were traced for.
    inputs: tuple[Strides, ...] = ()
    grads: tuple[Strides, ...] = ()


def backward_of(body: Body, key: str) -> Later:
    """What runs where a gradient came in."""
    assert body.backward is not None, f"region {key} was captured without a gradient"
    return body.backward


def as_traced(x: Tensor, strides: Strides) -> Tensor:
    """``x`` with the strides that the body was traced for; attention kernels differ in theirs."""
    if x.stride() == strides:
        return x
    pairs = zip(x.shape, x.stride(), strides, strict=True)
    if not any(n > 1 and have != want for n, have, want in pairs):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class RegionKernels(ABC):
    """What the compiler made of a region, for all sizes."""

    key: str  # what the op knows it by
    region: Region  # the region itself
    bound: BoundSizes  # its sizes that vary
    num_outputs: int  # outputs of the region itself
    grad_outputs: tuple[int, ...]  # which outputs take an incoming gradient
    # The inputs and outputs that ``fxrl::region_again`` takes; None where it makes no outputs.
    again: tuple[Source, ...] | None = None
    min_rows: int = 1  # tiles of fewer rows are padded (a compiled body may assume at least 2)

    @property
    def makes_vectors(self) -> bool:
        """Whether the forward makes the gradients; see ``new_vectors``."""
        return self.region.cut == "vectors" and bool(self.grad_outputs)

    @abstractmethod
    def body(self, sizes: Sequence[Size]) -> Body:
        """The body for these sizes; the first one where they are symbols themselves."""

    @abstractmethod
    def runs_again(self) -> bool:
        """Whether the backward that runs now may run once more (``retain_graph=True``)."""

    @abstractmethod
    def fake_outputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs and kept values on fake tensors."""

    def fake_again(self, sizes: Sequence[Size], device: torch.device) -> list[Tensor]:
        """Outputs of ``fxrl::region_again``, on fake tensors."""
        named = dict(zip(self.bound.names, sizes, strict=True))
        outputs: Any = self.region.forward.graph.output_node().args[0]
        made = []
        for val in map(val_of, outputs):
            shape = [self.bound.size(size, named) for size in val.shape]
            made.append(torch.empty(shape, dtype=val.dtype, device=device))
        return made

    def fake_grads(self, sizes: Sequence[Size], device: torch.device) -> list[Tensor]:
        """Gradients of the inputs that need one, on fake tensors."""
        named = dict(zip(self.bound.names, sizes, strict=True))
        grads = []
        for spec in (spec for spec in self.region.inputs if spec.needs_grad):
            first = [named["rows"]] if spec.tiled else []
            rest = [self.bound.size(size, named) for size in spec.example.shape[len(first) :]]
            if spec.split is not None:
                rest[spec.split] *= self.region.groups
            grads.append(torch.empty([*first, *rest], dtype=spec.example.dtype, device=device))
        return grads


_LIVE: WeakValueDictionary[str, RegionKernels] = WeakValueDictionary()


def register(kernels: RegionKernels) -> RegionKernels:
    """Make kernels callable by their key for as long as somebody holds what is returned.

    Equal content and options have one key: where it lives already, the living kernels are returned.
    """
    return _LIVE.setdefault(kernels.key, kernels)


def registered(key: str) -> RegionKernels | None:
    """The kernels under a key, if they live."""
    return _LIVE.get(key)


def lookup(key: str) -> RegionKernels:
    kernels = _LIVE.get(key)
    assert kernels is not None, f"region {key} was never built, or its capture is gone"
    return kernels
