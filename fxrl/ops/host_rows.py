"""Rows of a frozen table that lies in pinned host memory.

    torch.ops.fxrl.host_rows(ids, table)

is an embedding's lookup. The table ``[N, K]`` belongs to the GPU that computes, as any tensor of
its, but its memory is the host's (``on_host``): a kernel reads what it looks up over the link. On a
CPU it is a table like another.

NOTE [Why the GPU reads the host's memory]: copying rows together on the host would wait for the
ids, and take its threads; the kernel of a lookup runs at the speed of the link as it is (8,192 rows
of 8 KiB in 1.3 ms on an H200, 51 GB/s). Of 1.16 GiB, Qwen3-8B's table, a step reads 64 MiB.

NOTE [Why a lookup of its own]: the planner knows by it which inputs of a graph take no GPU memory,
and what reading them costs.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

from fxrl.errors import HostMemoryError, reason_of
from fxrl.ops.host_memory import pinned_bytes

#: By address: memory of the host that a GPU's tensors are views of, while there are any.
_MEMORY: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


class _Memory:
    """Pinned bytes as PyTorch takes another library's memory on a GPU, and holds it."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def on_host(tensor: Tensor) -> Tensor:
    """A dense tensor's values in pinned host memory, as a tensor of the same GPU; the tensor itself
    where it lies on the host already. Raises ``HostMemoryError``."""
    if tensor.device.type != "cuda" or is_on_host(tensor):
        return tensor
    try:
        pinned = pinned_bytes(tensor.device, tensor.nbytes)
    except (OSError, RuntimeError) as error:  # PyTorch raises nothing narrower
        raise HostMemoryError(
            f"there are no {tensor.nbytes / 2**30:.2f} GiB of pinned host memory "
            f"({reason_of(error)}); cure: leave the table on the GPU, or a larger limit of the "
            "container",
            reason_of(error),
        ) from error
    memory = _Memory(pinned)
    end = weakref.finalize(memory, torch.cuda.synchronize, tensor.device)  # a kernel may read it
    end.atexit = False  # the driver is gone by then
    _MEMORY[pinned.data_ptr()] = memory
    place = torch.as_tensor(memory, device=tensor.device)
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor of a GPU lies in memory that ``on_host`` has made."""
    return tensor.device.type == "cuda" and tensor.untyped_storage().data_ptr() in _MEMORY


@torch.library.custom_op("fxrl::host_rows", mutates_args=())
def host_rows(ids: Tensor, table: Tensor) -> Tensor:
    """See the module; ``ids`` have any shape, and the result is [*ids, K]."""
    return F.embedding(ids, table)


@host_rows.register_fake
def _(ids: Tensor, table: Tensor) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))
