"""Frozen weights of which each rank of a host holds a part: a model that does not fit one GPU.

    torchrun --nproc-per-node 2 loop.py

    model = fxrl.models.lora(fxrl.models.shard(model))       # or load_model(..., peers=Peers.of())
    step = fxrl.optimize(model, loss_fn)

The rows of Linears and embeddings are shared out, the output layer's among them; what is read of
the other ranks' is ``fxrl.ops.sharded``'s. So are values in 8 or 4 bits, but not their scales.
Norms and what is trained are whole on every rank, and so is what a class of its own computes with
(Gemma's scaled embeddings, a mixture's experts).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxrl.ir.remark import format_bytes
from fxrl.models.checkpoint import (
    CheckpointTensors,
    HeldWeight,
    build_skeleton,
    held_weights,
    owner_of,
)
from fxrl.models.hf import ModelError
from fxrl.models.quantized import (
    Asked,
    Quantized,
    dtype_of,
    read_in_bits,
    settled,
    skeleton_in_bits,
)
from fxrl.ops.checksum import checksum
from fxrl.ops.dequantized import sizes
from fxrl.ops.fp8 import E4M3
from fxrl.ops.sharded import Layout, Peers, Shards, new_part, sharded_mm, sharded_rows

log = logging.getLogger(__name__)
#: Parts begin at multiples of this many bytes, as products want their operands.
_ALIGNED = 256


class Sharded(nn.Module):
    """What has a part of a weight's rows; the base of those that compute with it.

    NOTE [Why the part is no parameter]: whatever moves, casts, sends or saves the parameters of a
    model would make of this rank's part another one's (DistributedDataParallel sends rank 0's to
    all), or memory that nobody else maps. It is never written, and none of them is to touch it.
    """

    part: Tensor  # this rank's rows as bytes [rows / ranks, columns * itemsize]
    layout: Layout  # how to read them; adapters take its dtype for the weight's
    shards: Shards | None  # maps the other ranks' parts; None on ``meta``
    # The whole scale of a quantised weight. No parameter either: nothing may cast it.
    scale: Tensor | None

    def hold(
        self, part: Tensor, layout: Layout, shards: Shards | None, scale: Tensor | None
    ) -> None:
        """Sets the attributes, in place of ``__init__``: PyTorch's would make a weight."""
        nn.Module.__init__(self)
        self.part, self.layout, self.shards, self.scale = part, layout, shards, scale

    @property
    def held(self) -> list[Tensor]:
        """The part and the scales, as the ops take them."""
        return [self.part] if self.scale is None else [self.part, self.scale]

    @property
    def weight(self) -> Tensor:
        """Looks like the weight for PEFT, which puts adapters on its device, and holds no number:
        who reads it has NaN, and who writes to it an error. ``whole`` has the numbers."""
        columns = self.layout.columns(self.part.shape[1])
        nan = self.part.new_full((), torch.nan, dtype=self.layout.dtype)
        return nan.expand(self.layout.outputs, columns)

    def whole(self) -> Tensor:
        """A copy of the weight."""
        assert self.shards is not None, "on meta there are no numbers"
        return self.shards.whole(self.held, self.layout)

    def stored(self) -> dict[str, Tensor]:
        """Copies of the weight as it is held, and of its scales, by name."""
        assert self.shards is not None, "on meta there are no numbers"
        if self.scale is None:
            return {"weight": self.whole()}
        kind = E4M3 if self.layout.format == "fp8" else torch.uint8
        plain = self.layout._replace(dtype=kind, format="")
        return {"weight": self.shards.whole(self.held, plain), "weight_scale": self.scale}

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse, by a ``ModelError``, to be trained in full, as PEFT's ``modules_to_save``
        asks."""
        if requires_grad:
            raise ModelError(
                f"a {type(self).__name__} is to be trained, and its weight is shared out over "
                "ranks, frozen; put an adapter beside it, or leave sharding out"
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the bias; the part, which other ranks have mapped, stays where it is."""
        there = fn(self.part.new_empty(0)).device
        if there != self.part.device:
            raise ModelError(
                f"weights that ranks share stay on {self.part.device}, and were to go to {there}; "
                "load the model there, and shard it then"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(tensor): tensor for tensor in self.held}
        made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def extra_repr(self) -> str:
        """Sizes, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, rows_held={self.part.shape[0]}"


class ShardedLinear(Sharded, nn.Linear):  # type: ignore[override]
    """``x weight^T + bias`` with a weight of which this rank holds some rows; for ``part``,
    ``layout``, ``shards`` and ``scale`` see ``Sharded``."""

    def __init__(
        self,
        part: Tensor,
        layout: Layout,
        bias: nn.Parameter | None = None,
        shards: Shards | None = None,
        scale: Tensor | None = None,
    ) -> None:
        self.hold(part, layout, shards, scale)
        self.out_features, self.in_features = self.weight.shape
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the input's dtype, or autocast's."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        flat = input.reshape(-1, self.in_features)
        made: Tensor = sharded_mm(flat, self.held, *self.layout, False)
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias.to(made.dtype)


class ShardedEmbedding(Sharded, nn.Embedding):  # type: ignore[override]
    """A table of which this rank has a part of the rows."""

    def __init__(
        self,
        part: Tensor,
        layout: Layout,
        shards: Shards | None = None,
        scale: Tensor | None = None,
    ) -> None:
        self.hold(part, layout, shards, scale)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False

    def forward(self, input: Tensor) -> Tensor:
        """ids -> [*ids, embedding_dim]."""
        return sharded_rows(input, self.held, *self.layout)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------- which, and where
@dataclass(frozen=True, slots=True)
class Shared(HeldWeight):
    """A weight to be distributed over ranks: in full, or its values in 8 or 4 bits."""

    layout: Layout  # how to read its rows
    scale: Tensor | None = None  # of values in 8 or 4 bits

    @property
    def row_bytes(self) -> int:
        return self.weight.shape[1] * self.weight.itemsize

    def part_rows(self, ranks: int) -> int:
        """Rows of each rank's part; of the last ones some may stand for none."""
        return -(-len(self.weight) // ranks)

    def rows_of(self, rank: int, ranks: int) -> slice:
        """The rows of the weight that a rank holds."""
        share, most = self.part_rows(ranks), len(self.weight)
        return slice(min(rank * share, most), min((rank + 1) * share, most))


def chosen(model: nn.Module, *, trained: bool = False) -> list[Shared]:
    """The weights of a model's Linears and embeddings that are distributed over the ranks: the
    frozen ones, or all with ``trained``."""
    able = [
        Shared(one.weight, one.holders, Layout(len(one.weight), one.weight.dtype, ""))
        for one in held_weights(model)
    ]
    able += _in_bits(model)
    taken = [one for one in able if trained or not one.weight.requires_grad]
    if taken:
        return taken
    if able:
        why = (
            ", as they are trained, and only frozen ones are; freeze them "
            "(model.requires_grad_(False)) and put an adapter beside them after that"
        )
    else:
        why = ": the model has no nn.Linear and no nn.Embedding whose weight nothing else has"
    raise ModelError(f"no weight of a Linear can be shared out{why}")


def _in_bits(model: nn.Module) -> list[Shared]:
    """The weights that are held in 8 or 4 bits."""
    found: dict[int, Shared] = {}
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            layout = Layout(len(module.weight), dtype_of(module), module.format)
            new = Shared(module.weight, {}, layout, module.weight_scale.detach())
            found.setdefault(id(module.weight), new).holders[path] = module
    return [*found.values()]


def _laid_out(weights: Sequence[Shared], ranks: int) -> tuple[list[int], int]:
    """The offset of each weight's part, and the bytes of all parts."""
    places, size = [], 0
    for one in weights:
        places.append(size)
        size += -(-one.part_rows(ranks) * one.row_bytes // _ALIGNED) * _ALIGNED
    return places, size


def _parts(
    weights: Sequence[Shared], ranks: int, memory: Tensor
) -> Iterator[tuple[Shared, Tensor]]:
    """Each weight's part, as rows in its own dtype, of a rank's memory."""
    for one, start in zip(weights, _laid_out(weights, ranks)[0], strict=True):
        rows = one.part_rows(ranks)
        flat = memory[start : start + rows * one.row_bytes]
        yield one, flat.view(rows, one.row_bytes).view(one.weight.dtype)


def _put(
    model: nn.Module, weights: Sequence[Shared], memory: Tensor, ranks: int, shards: Any
) -> None:
    """Replace the modules that hold the weights by ones that hold this rank's parts."""
    for one, part in _parts(weights, ranks, memory):
        given = part.view(torch.uint8), one.layout
        for path, module in one.holders.items():
            made: nn.Module
            if isinstance(module, nn.Linear):
                made = ShardedLinear(*given, module.bias, shards, one.scale)
            else:
                made = ShardedEmbedding(*given, shards, one.scale)
            setattr(*owner_of(model, path), made.train(module.training))


def _shared(model: nn.Module, weights: Sequence[Shared], memory: Tensor, peers: Peers) -> None:
    """Map the others' parts, when this rank's are written, and put them in the holders' places."""
    largest = max(one.layout.piece_bytes(one.row_bytes) for one in weights)
    shards = Shards(peers.map(memory), peers.rank, largest)
    _put(model, weights, memory, peers.size, shards)
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
    """Share the frozen weights of a model out over the ranks of a host; all of them call it.

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
    weights = chosen(model, trained=trained)
    devices = {one.weight.device for one in weights}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        raise ModelError(f"a rank's weights are on one device, and these on {names}")
    peers.check_same("the weights", [*map(_told, weights)])
    (device,) = devices
    memory = new_part(_laid_out(weights, peers.size)[1], device)
    for one, part in _parts(weights, peers.size, memory):
        mine = one.weight[one.rows_of(peers.rank, peers.size)]
        part[: len(mine)] = mine
    _shared(model, weights, memory, peers)
    return model


def _told(one: Shared) -> tuple[Any, ...]:
    """What ranks must have alike of a weight: sums over its bits do not depend on the device."""
    weight = one.weight
    sums = [checksum(tensor) for tensor in (weight, one.scale) if tensor is not None]
    return one.names, tuple(weight.shape), str(weight.dtype), sums


def shard_skeleton(model: nn.Module, ranks: int) -> nn.Module:
    """A model on ``meta`` as one of ``ranks`` will have it."""
    weights = chosen(model)
    memory = torch.empty(_laid_out(weights, ranks)[1], dtype=torch.uint8, device="meta")
    _put(model, weights, memory, ranks, None)
    return model


# ---------------------------------------------------------------------------- from a checkpoint
def load_sharded(
    folder: Path,
    peers: Peers,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: Asked | None = None,
) -> nn.Module:
    """The model of a checkpoint, of whose weights this rank reads its part; all ranks call it.

    No rank ever has more of such a weight than its part; of one in 8 or 4 bits, which is read or
    quantised whole, no more than one.

    Args:
        folder: with ``config.json`` and safetensors.
        dtype: None is the checkpoint's.
        device: of the model.
        quantization: as of ``load_quantized``.

    Returns:
        The model in eval mode.

    Raises:
        ModelError: something of the checkpoint is missing, or no weight can be shared out.
    """
    model: Any = build_skeleton(folder, dtype)
    checkpoint = CheckpointTensors(folder, model)
    how = settled(folder, model.config, quantization)
    if how is not None:
        skeleton_in_bits(model, folder, how)
    weights = chosen(model, trained=True)
    peers.check_same(
        "the checkpoints",
        [(one.names, tuple(one.weight.shape), str(one.weight.dtype)) for one in weights],
    )
    memory, placed = new_part(_laid_out(weights, peers.size)[1], torch.device(device)), []
    for one, part in _parts(weights, peers.size, memory):
        mine, scale = one.rows_of(peers.rank, peers.size), None
        if one.layout.format:
            assert how is not None
            shape = torch.Size(sizes([one.weight], how.format))
            dtype = one.layout.dtype
            values, scale, _ = read_in_bits(checkpoint, one.holders, shape, dtype, how, "cpu")
            read, scale = values[mine], scale.to(device)
        else:
            read = checkpoint.rows(one.names, one.weight.shape, mine.start, mine.stop)
        part[: len(read)] = read.to(device, part.dtype)
        placed.append(replace(one, scale=scale))
    _shared(model, placed, memory, peers)
    checkpoint.fill(device)
    return model.to(device).eval()  # type: ignore[no-any-return]
