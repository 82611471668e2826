"""A region group by group, each with its part of the inputs that are split; outputs are sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fxrl.ir.region import InputSpec, Region
from fxrl.ops.region.kernels import Body, Later, RegionKernels, as_traced, backward_of
from fxrl.ops.region.tiles import accumulator


def group_part(x: Tensor, spec: InputSpec, group: int) -> Tensor:
    """The part of a region's input that a group reads."""
    if spec.split is None:
        return x
    size = spec.example.shape[spec.split]
    return x.narrow(spec.split, group * size, size)


def side_by_side(part: Tensor, groups: int) -> Tensor:
    """Memory for what groups keep, ``[groups, ...]``, that of each laid out as ``part``."""
    shape, strides = (groups, *part.shape), (part.numel(), *part.stride())
    return torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)


def forward_by_groups(region: Region, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    splits = [*[None] * body.num_outputs, *[BESIDE] * body.num_kept]
    sums = _GroupSums(splits, region.groups)
    for group in range(region.groups):
        parts = [
            as_traced(group_part(x, spec, group), strides)
            for x, spec, strides in zip(inputs, region.inputs, body.inputs, strict=True)
        ]
        sums.add(group, body.forward(*parts))
    return sums.results()


def _read_by_group(
    region: Region, body: Body, later: Later, kept: Sequence[Tensor], group: int
) -> list[Tensor]:
    """A group's part of what all groups read behind the forward."""
    return [
        as_traced(group_part(x, region.inputs[i], group), body.inputs[i])
        if kind == "input"
        else x[group]
        for x, (kind, i) in zip(kept, later.read, strict=True)
    ]


def again_by_groups(kernels: RegionKernels, body: Body, kept: Sequence[Tensor]) -> list[Tensor]:
    """Outputs once more, from what groups keep."""
    region = kernels.region
    assert body.again is not None, f"the groups of region {kernels.key} keep nothing"
    sums = _GroupSums([None] * body.num_outputs, region.groups)
    for group in range(region.groups):
        sums.add(group, body.again(_read_by_group(region, body, body.again, kept, group)))
    return sums.results()


def backward_by_groups(
    kernels: RegionKernels, body: Body, kept: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """Gradients of split inputs group by group; those that groups share are summed."""
    region, backward = kernels.region, backward_of(body, kernels.key)
    sums = _GroupSums([spec.split for spec in region.inputs if spec.needs_grad], region.groups)
    for group in range(region.groups):
        sums.add(group, backward(_read_by_group(region, body, backward, kept, group), grads))
    return sums.results()


#: Of a value that each group makes: it lies beside those of others, in a new first dim.
BESIDE: Final = -1


class _GroupSums:
    """Values that each group makes: put together along the dim that is split, or summed, or kept
    side by side.

    A caller that holds on to a group's values would have them beside the next group's.
    """

    def __init__(self, splits: Sequence[int | None], groups: int) -> None:
        self._splits, self._groups = splits, groups
        self._dtypes: list[torch.dtype] = []
        self._totals: list[Tensor] = []

    def add(self, group: int, parts: Sequence[Tensor]) -> None:
        """What one group has made."""
        if not self._totals:
            self._dtypes = [part.dtype for part in parts]
            self._totals = [*map(self._total, parts, self._splits)]
        for total, part, split in zip(self._totals, parts, self._splits, strict=True):
            if split is None:
                total += part
            elif split == BESIDE:
                total[group].copy_(part)
            else:
                total.narrow(split, group * part.shape[split], part.shape[split]).copy_(part)

    def results(self) -> list[Tensor]:
        """What all groups have made, in the dtypes of a group's values."""
        return [total.to(d) for total, d in zip(self._totals, self._dtypes, strict=True)]

    def _total(self, part: Tensor, split: int | None) -> Tensor:
        if split is None:
            return accumulator(part, False, self._groups)
        if split == BESIDE:
            return side_by_side(part, self._groups)
        sizes = list(part.shape)
        sizes[split] *= self._groups
        return part.new_empty(sizes)
