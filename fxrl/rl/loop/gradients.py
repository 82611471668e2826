"""Gradients added up over the ranks: an adapter's while its last backward still runs.

NOTE [What is begun early]
Parameters are in buckets, in reverse order, which is about the order in which a backward is done
with them. As soon as a step's last backward has accumulated all gradients of a bucket, its flat
copy in float32 is sent. Buckets begin in their order on every rank, so that collectives match in
whatever order gradients come: one that is ready waits for those ahead. What no backward began, the
end does: on a rank without micro-batches all of it, with zeros. The ranks meet ahead of the last
backward, behind captures, compilations and runs that memory made them repeat.

A gradient stays what it is until the end. Where one has changed since its bucket was sent, as code
that runs backward passes within one (reentrant checkpointing) may accumulate it in several parts,
the bucket is summed anew on all ranks. So what is begun early never decides about a number.

All weights' gradients are summed behind the backward: copies of them must not stand beside what it
still needs. So are those of ranks that share sequences, whose own collectives run in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.distributed import BUCKET_BYTES, Ranks, buckets, flattened
from fxrl.dtypes import wide_dtype

EARLY_BYTES = 25 * 2**20
"""Of a bucket that is sent while the backward runs; DistributedDataParallel's own default."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients are sent together."""

    parameters: Sequence[nn.Parameter]
    # Those whose gradients the last backward has not accumulated yet.
    missing: set[nn.Parameter] = field(default_factory=set)
    parts: Sequence[Tensor] = ()  # the gradients as they were sent, and then their sums
    work: Any = None
    stale: bool = False  # a gradient has changed since


class GradientSum:
    """Sums the gradients of ``parameters`` over ``ranks``; with ``early``, already during the last
    backward if they are an adapter's (at most ``BUCKET_BYTES``). ``sharing`` consecutive ranks have
    the same gradients, which count once."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ranks: Ranks,
        *,
        early: bool = True,
        sharing: int = 1,
    ) -> None:
        self._parameters, self._ranks, self._counts = parameters, ranks, ranks.rank % sharing == 0
        self._buckets: list[_Bucket] = []
        sent_bytes = sum(p.numel() * wide_dtype(p.dtype).itemsize for p in parameters)
        if early and ranks.size > 1 and sent_bytes <= BUCKET_BYTES:
            self._buckets = [_Bucket(part) for part in buckets(parameters[::-1], EARLY_BYTES)]
        self._of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._begun: int | None = None

    @contextmanager
    def early(self) -> Iterator[None]:
        """Around the last backward of a step on this rank."""
        if not self._buckets:
            yield
            return
        self._open()
        every: Sequence[Any] = self._parameters  # the method has no types
        hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in every]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """All ranks' gradients are in ``parameters``. What no rank's loss depends on has none, as
        on one rank."""
        if self._ranks.size == 1:
            return
        if self._buckets and self._begun is None:
            self._open()
        for bucket in self._buckets[self._begun :]:
            self._begin(bucket)
        own = [p.grad is not None for p in self._parameters]
        own += [bucket.stale for bucket in self._buckets]
        flags = [any(each) for each in zip(*self._ranks.gather(own), strict=True)]
        for parameter, used in zip(self._parameters, flags, strict=False):
            if used and (parameter.grad is None or not self._counts):
                parameter.grad = torch.zeros_like(parameter)
        with self._ranks.exposed(self._parameters[0].device):
            summed = self._taken(flags[len(self._parameters) :])
            rest = (p.grad for p in self._parameters if p not in summed)
            self._ranks.sum_([grad for grad in rest if grad is not None])
        self._begun = None

    def _open(self) -> None:
        self._ranks.meet()
        self._begun = 0
        for bucket in self._buckets:
            bucket.missing, bucket.stale = set(bucket.parameters), False

    def _ready(self, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        bucket = self._of[parameter]
        bucket.stale |= bucket.work is not None
        bucket.missing.discard(parameter)
        assert self._begun is not None
        for following in self._buckets[self._begun :]:
            if following.missing:
                break
            self._begin(following)

    def _begin(self, bucket: _Bucket) -> None:
        flat, bucket.parts = flattened(bucket.parameters)
        for parameter, part in zip(bucket.parameters, bucket.parts, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
        bucket.work = self._ranks.begin_sum(flat)
        assert self._begun is not None
        self._begun += 1

    def _taken(self, stale: Sequence[bool]) -> set[nn.Parameter]:
        """Waits for what was begun, and takes what is not stale; the parameters of that."""
        taken: set[nn.Parameter] = set()
        for bucket, skipped in zip(self._buckets, stale, strict=True):
            self._ranks.finish(bucket.work)
            for parameter, part in zip(bucket.parameters, bucket.parts, strict=True):
                if not skipped and parameter.grad is not None:
                    parameter.grad.copy_(part)
            taken |= set() if skipped else {*bucket.parameters}
            bucket.parts, bucket.work = (), None
        return taken
