"""Whether tensors have the same bits, found where they are."""

import torch
from torch import Tensor

_PIECE = 2**22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The same memory read as integers of the same width, any strides."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def checksum(value: Tensor) -> list[int]:
    """Sums over a tensor's bits, plain and by place, modulo 2**64."""
    flat = value.contiguous().view(-1)
    if flat.nbytes % 8 == 0:
        if flat.storage_offset() * flat.itemsize % 8:
            flat = flat.clone()
        words = flat.view(torch.int64)
    else:
        words = bits(flat).to(torch.int64)
    places = torch.arange(1, 1 + min(len(words), _PIECE), device=words.device)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        plain = piece.sum()
        sums[0] += plain
        sums[1] += (piece * places[: len(piece)]).sum() + start * plain
    return list(sums.tolist())
