"""Frozen Linears of which each rank of a host holds a part: a model that does not fit one GPU.

    torchrun --nproc-per-node 2 loop.py

    model = fxrl.models.lora(fxrl.models.shard(model))       # or load_model(..., peers=Peers.of())
    step = fxrl.optimize(model, loss_fn)

A weight's rows are shared out; what products read of the other ranks' is ``fxrl.ops.sharded``'s.
Embeddings, norms, the output layer and what is trained are whole on every rank.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxrl.ir.remark import format_bytes
from fxrl.models.checkpoint import (
    CheckpointTensors,
    bits,
    build_skeleton,
    owner_of,
)
from fxrl.models.hf import ModelError
from fxrl.models.quantized import QuantizedLinear, linears_of
from fxrl.ops.sharded import Peers, Shards, new_part, sharded_mm

log = logging.getLogger(__name__)
#: Parts begin at multiples of this many bytes, as products want their operands.
_ALIGNED = 256


class ShardedLinear(nn.Linear):
    """``x weight^T + bias`` with a weight of which this rank has a part of the rows.

    NOTE [Why the part is no parameter]: whatever moves, casts, sends or saves the parameters of a
    model would make of this rank's part another one's (DistributedDataParallel sends rank 0's to
    all), or memory that nobody else maps. It is never written, and none of them is to touch it.

    Args:
        part: this rank's rows as bytes [out / ranks, in * itemsize].
        ranks: that have one.
        dtype: of the weight.
        bias: [out], or None.
        shards: what maps the others' parts; None on ``meta``.
    """

    def __init__(
        self,
        part: Tensor,
        ranks: int,
        dtype: torch.dtype,
        bias: nn.Parameter | None = None,
        shards: Shards | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and draw a weight
        self.part, self.ranks, self.dtype, self.shards = part, ranks, dtype, shards
        self.out_features = part.shape[0] * ranks
        self.in_features = part.shape[1] // dtype.itemsize
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Looks like the weight for PEFT, which puts adapters on its device, and holds no number:
        who reads it has NaN, and who writes to it an error. ``whole`` has the numbers."""
        return self.part.new_full((), torch.nan, dtype=self.dtype).expand(
            self.out_features, self.in_features
        )

    def whole(self) -> Tensor:
        """A copy of the weight [out, in]."""
        assert self.shards is not None, "on meta there are no numbers"
        return self.shards.whole(self.part, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the input's dtype, or autocast's."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, self.in_features)
        made: Tensor = sharded_mm(rows, [self.part], self.ranks, self.dtype, False)
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the bias.

        Raises:
            ModelError: the model is to be moved elsewhere.
        """
        there = fn(self.part.new_empty(0)).device
        if there != self.part.device:
            raise ModelError(
                f"weights that ranks share stay on {self.part.device}, and were to go to {there}; "
                "load the model there, and shard it then"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.part)] = self.part
        made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def extra_repr(self) -> str:
        """Sizes and ranks, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, ranks={self.ranks}"


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights on this rank, and of the buffers that others' are brought to."""
    linears = [module for module in model.modules() if isinstance(module, ShardedLinear)]
    whole = [linear.ranks * linear.part.nbytes for linear in linears]
    parts = sum(linear.part.nbytes for linear in linears)
    return sum(p.nbytes for p in model.parameters()) + parts + 2 * max(whole, default=0)


# ---------------------------------------------------------------------------- which, and where
def chosen(model: nn.Module, ranks: int, *, trained: bool = False) -> dict[str, nn.Linear]:
    """The Linears of a model whose weights are shared out, by path.

    Args:
        trained: those whose weight requires a gradient, too.

    Raises:
        ModelError: there is none.
    """
    held = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {
        path: linear
        for path, linear in linears_of(model)
        if (trained or not linear.weight.requires_grad)
        and held[id(linear.weight)] == 1
        and linear.out_features % ranks == 0
    }
    if not found:
        trains = any(linear.weight.requires_grad for _, linear in linears_of(model))
        why = "no weight of a Linear can be shared out"
        if any(isinstance(module, QuantizedLinear) for module in model.modules()):
            raise ModelError(f"{why}: they are in 8 or 4 bits; load the checkpoint in bf16")
        if trains and not trained:
            raise ModelError(
                f"{why}, as they are trained, and only frozen ones are; freeze them "
                "(model.requires_grad_(False)) and put an adapter beside them after that"
            )
        raise ModelError(f"{why} over {ranks} ranks: none has a multiple of {ranks} outputs")
    return found


def _laid_out(linears: Mapping[str, nn.Linear], ranks: int) -> tuple[dict[str, int], int]:
    """Where each weight's part begins, and the bytes of all."""
    places, size = {}, 0
    for path, linear in linears.items():
        places[path] = size
        size += -(-linear.weight.nbytes // ranks // _ALIGNED) * _ALIGNED
    return places, size


def _parts(
    linears: Mapping[str, nn.Linear], ranks: int, memory: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Each weight's part, as rows in its own dtype, of a rank's memory."""
    for path, start in _laid_out(linears, ranks)[0].items():
        weight = linears[path].weight
        flat = memory[start : start + weight.nbytes // ranks]
        yield path, flat.view(weight.dtype).view(-1, weight.shape[1])


def _put(
    model: nn.Module, linears: Mapping[str, nn.Linear], memory: Tensor, ranks: int, shards: Any
) -> None:
    """What takes the Linears' places."""
    for path, part in _parts(linears, ranks, memory):
        linear = linears[path]
        made = ShardedLinear(part.view(torch.uint8), ranks, part.dtype, linear.bias, shards).train(
            linear.training
        )
        setattr(*owner_of(model, path), made)


def _shared(
    model: nn.Module, linears: Mapping[str, nn.Linear], memory: Tensor, peers: Peers
) -> None:
    """Map the others' parts, when this rank's are written, and put them in the Linears' places."""
    largest = max(linear.weight.nbytes for linear in linears.values())
    shards = Shards(peers.map(memory), peers.rank, largest)
    _put(model, linears, memory, peers.size, shards)
    whole = sum(p.nbytes for p in model.parameters())
    log.info(
        "%s of weights are shared out over %d ranks, and %s are whole on each",
        format_bytes(memory.numel() * peers.size),
        peers.size,
        format_bytes(whole),
    )


# ---------------------------------------------------------------------------- a model that is there
@torch.no_grad()
def shard(model: nn.Module, peers: Peers | None = None, *, trained: bool = False) -> nn.Module:
    """Share the frozen Linears of a model out over the ranks of a host; all of them call it.

    Every rank has loaded the same model, on a GPU of its own or on the CPU, and has room for a part
    more; a model that no rank has room for is read by ``load_model(peers=...)``.
    Ranks then train as they like, together or not: none waits for another one in a step. On GPUs no
    process may end before the others are done with the model.

    Args:
        model: changed in place; as it was where this raises.
        peers: the ranks; by default those of ``torch.distributed`` on this host.
        trained: share those out, too, that require a gradient, which have none from then on.

    Returns:
        The model.

    Raises:
        ConfigError: there are no other ranks on this host.
        ModelError: no frozen weight can be shared out.
        FxrlError: the ranks have different models.
    """
    peers = peers or Peers.of()
    linears = chosen(model, peers.size, trained=trained)
    devices = {linear.weight.device for linear in linears.values()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        raise ModelError(f"a rank's weights are on one device, and these on {names}")
    peers.check_same("the weights", [*map(_told, linears.items())])
    (device,) = devices
    memory = new_part(_laid_out(linears, peers.size)[1], device)
    for path, part in _parts(linears, peers.size, memory):
        start = peers.rank * len(part)
        part.copy_(linears[path].weight[start : start + len(part)])
    _shared(model, linears, memory, peers)
    return model


def _told(named: tuple[str, nn.Linear]) -> tuple[Any, ...]:
    """What ranks must have alike of a Linear: sums over its bits do not depend on the device."""
    path, linear = named
    weight = linear.weight
    total = int(bits(weight.contiguous()).sum(dtype=torch.int64))
    return path, tuple(weight.shape), str(weight.dtype), total


def shard_skeleton(model: nn.Module, ranks: int) -> nn.Module:
    """A model on ``meta`` as one of ``ranks`` will have it.

    Raises:
        ModelError: no frozen weight can be shared out.
    """
    linears = chosen(model, ranks)
    memory = torch.empty(_laid_out(linears, ranks)[1], dtype=torch.uint8, device="meta")
    _put(model, linears, memory, ranks, None)
    return model


# ---------------------------------------------------------------------------- from a checkpoint
def load_sharded(
    folder: Path,
    peers: Peers,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of a checkpoint, of whose Linears this rank reads its part; all ranks call it.

    No rank ever has more of such a weight than its part.

    Args:
        folder: with ``config.json`` and safetensors.
        dtype: None is the checkpoint's.
        device: of the model.

    Returns:
        The model in eval mode.

    Raises:
        ModelError: something of the checkpoint is missing, or no weight can be shared out.
    """
    model: Any = build_skeleton(folder, dtype)
    linears = chosen(model, peers.size, trained=True)
    peers.check_same(
        "the checkpoints",
        [(p, tuple(m.weight.shape), str(m.weight.dtype)) for p, m in linears.items()],
    )
    checkpoint = CheckpointTensors(folder, model)
    memory = new_part(_laid_out(linears, peers.size)[1], torch.device(device))
    for path, part in _parts(linears, peers.size, memory):
        shape, start = linears[path].weight.shape, peers.rank * len(part)
        part.copy_(checkpoint.rows(f"{path}.weight", shape, start, start + len(part)))
    checkpoint.fill(device, but={f"{path}.weight" for path in linears})
    _shared(model, linears, memory, peers)
    return model.to(device).eval()  # type: ignore[no-any-return]
