"""``fxrl::masked_attention`` on a GPU: FlexAttention, compiled for a mask's expression.

PyTorch's own higher-order ops, one for the forward and one for the backward, are traced with the
expression inside and given to Inductor, which makes a Triton kernel of each. Sizes are symbols, as
in a region's body, so what is compiled serves every length.

NOTE [Why not torch.compile(flex_attention)]: the vjp of an opaque op gets tensors only, so its
autograd graph would have to be made by running the forward again; here the backward gets output and
logarithm. And Dynamo's guards and recompile limits are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import BlockMask

from fxrl.capture._torch import enable_python_dispatcher, make_fx
from fxrl.compile._torch import holds, new_size, symbolic_mode
from fxrl.compile.bodies.inductor import InductorOptions, begin_body, in_own_thread
from fxrl.dtypes import wide_dtype
from fxrl.ir.graph import Size, memory_like
from fxrl.ops.masked_attention import BLOCK, Problem, attach, expression

aten = torch.ops.aten
hop = torch.ops.higher_order
Run = Callable[..., Sequence[Tensor]]

_BLOCK_LISTS = tuple(
    f"{full}{side}_{what}"
    for side in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
)
#: As ``flex_attention`` sets them. TRITON is the one kernel that has a backward, does not depend on
#: the length, and allows rows that see nothing.
_OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """The key of a compiled kernel: all that its code depends on, but for the sizes that vary."""

    mask: str
    scale: float
    dtype: torch.dtype
    device: torch.device
    heads: int
    groups: int
    features: tuple[int, int]
    # Of each the dims that it has of [batch, head, query, key], and its dtype.
    vectors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    blocks: tuple[bool, bool]  # of the lists of blocks those that they have of [batch, head]
    square: bool  # as many queries as keys
    # Whether queries, and keys, are whole blocks; the kernel checks no bounds then.
    whole: tuple[bool, bool]


class FlexAttention:
    """FlexAttention for any mask, compiled on first use with these Inductor options; None runs
    PyTorch's reference of the same ops, on every device."""

    def __init__(self, options: InductorOptions | None) -> None:
        self._options = options
        self._known: dict[_Kind, list[_Compiled]] = {}

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """As ``fxrl.ops.masked_attention.masked_attention``."""
        heads = map(_rows, (problem.query, problem.key, problem.value))
        out, lse = self._compiled(problem).forward(
            *heads, *_plain(problem.vectors), *problem.blocks
        )
        return out, lse

    def backward(
        self, problem: Problem, grad: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``fxrl.ops.masked_attention.masked_attention_vjp``."""
        heads = map(_rows, (grad, problem.query, problem.key, problem.value, out))
        first, second, third = self._compiled(problem).backward(
            *heads, lse, *_plain(problem.vectors), *problem.blocks
        )
        return first, second, third

    def _compiled(self, problem: Problem) -> _Compiled:
        query, key, value = problem.query, problem.key, problem.value
        blocks = problem.blocks[0]
        sizes = {"batch": query.shape[0], "queries": query.shape[2], "keys": key.shape[2]}
        kind = _Kind(
            problem.mask,
            problem.scale,
            query.dtype,
            query.device,
            query.shape[1],
            key.shape[1],
            (query.shape[3], value.shape[3]),
            tuple((_dims(vector), vector.dtype) for vector in problem.vectors),
            (blocks.shape[0] > 1, blocks.shape[1] > 1),
            sizes["queries"] == sizes["keys"],
            (sizes["queries"] % BLOCK == 0, sizes["keys"] % BLOCK == 0),
        )
        variants = self._known.setdefault(kind, [])
        for one in variants:
            if one.serves(sizes):
                return one
        variants.append(_Compiled(kind, sizes, self._options))
        return variants[-1]


def _rows(x: Tensor) -> Tensor:
    """[B, H, T, D] whose memory is [B, T, H, D], as kernels are compiled for."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _dims(vector: Tensor) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(vector.shape) if size != 1)


def _plain(vectors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The vectors without dims of one entry."""
    return (vector.squeeze().contiguous() for vector in vectors)


class _Compiled:
    """Forward and backward for one kind and all sizes alike."""

    def __init__(self, kind: _Kind, sizes: dict[str, int], options: InductorOptions | None) -> None:
        self._kind, self._options = kind, options
        self._mode = symbolic_mode()
        self._counts: dict[str, Size] = {}  # of each size, how many of its units it is
        self._units: dict[str, int] = {}
        units = [BLOCK if whole else 1 for whole in kind.whole]
        self._batch = self._size("batch", sizes["batch"], 1)
        self._queries = self._keys = self._size("queries", sizes["queries"], units[0])
        if not kind.square:
            self._keys = self._size("keys", sizes["keys"], units[1])
        self._forward: Run | None = None
        self._backward: Run | None = None

    def serves(self, sizes: dict[str, int]) -> bool:
        """Whether what was compiled holds for these sizes."""
        counts = {name: sizes[name] // unit for name, unit in self._units.items()}
        return holds(self._mode, self._counts, counts)

    def forward(self, *inputs: Tensor) -> Sequence[Tensor]:
        """query, key, value, vectors, blocks -> output, logarithm"""
        if self._forward is None:
            self._forward = self._build(self._run, self._heads()[:3])
        return self._forward(*inputs)

    def backward(self, *inputs: Tensor) -> Sequence[Tensor]:
        """gradient, query, key, value, output, logarithm, vectors, blocks -> three gradients"""
        if self._backward is None:
            query, key, value, out, lse = self._heads()
            self._backward = self._build(self._differentiate, [out, query, key, value, out, lse])
        return self._backward(*inputs)

    # -- what is traced
    def _run(self, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> list[Tensor]:
        blocks, vectors = self._parted(rest)
        scale = self._kind.scale
        made = hop.flex_attention(
            query, key, value, _same, blocks, scale, dict(_OPTIONS), (), vectors
        )
        return list(made[:2])

    def _differentiate(self, grad: Tensor, *given: Tensor) -> list[Tensor]:
        blocks, vectors = self._parted(given[5:])
        made = hop.flex_attention_backward(
            *given[:5],
            grad,
            None,
            _same,
            lambda *given: [given[-1], None, None, None, None],  # of the score alone
            blocks,
            self._kind.scale,
            dict(_OPTIONS),
            (),
            vectors,
        )
        return list(made[:3])

    def _parted(self, rest: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Blocks as the higher-order ops take them, and vectors."""
        count = len(self._kind.vectors)
        lists: Any = dict(zip(_BLOCK_LISTS, rest[count:], strict=True))
        lengths: Any = (self._queries, self._keys)  # symbols
        blocks = BlockMask(
            seq_lengths=lengths,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=self._seen,
            **lists,
        )
        return blocks.as_tuple(), tuple(rest[:count])

    def _seen(
        self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, *vectors: Tensor
    ) -> Tensor:
        """The mask at one pair, as FlexAttention asks for it."""
        place = (batch, head, query, key)
        # as wide as positions are: what a mask makes of them must not overflow
        values = {"query": query.to(torch.int64), "key": key.to(torch.int64)}
        for index, (vector, (dims, _)) in enumerate(zip(vectors, self._kind.vectors, strict=True)):
            at = [place[dim] for dim in dims]
            values[f"v{index}"] = aten.index.Tensor(vector, at) if at else vector
        seen: Tensor = expression(self._kind.mask)(values)
        return seen

    # -- the values it is traced with
    def _size(self, name: str, size: int, unit: int) -> Size:
        """A size that varies by whole units."""
        self._units[name] = unit
        self._counts[name] = count = new_size(self._mode, name, size // unit)
        return size if isinstance(count, int) else count * unit

    def _heads(self) -> list[Tensor]:
        """query, key, value, output, logarithm"""
        kind = self._kind
        narrow, wide = kind.features
        sizes = (
            (self._queries, kind.heads, narrow),
            (self._keys, kind.groups, narrow),
            (self._keys, kind.groups, wide),
            (self._queries, kind.heads, wide),
        )
        dtype = wide_dtype(kind.dtype)
        lse = self._empty(dtype, self._batch, kind.heads, self._queries)
        return [*(self._empty(kind.dtype, self._batch, *s).transpose(1, 2) for s in sizes), lse]

    def _rest(self) -> Iterator[Tensor]:
        """vectors, blocks"""
        kind = self._kind
        place = (self._batch, kind.heads, self._queries, self._keys)
        for dims, dtype in kind.vectors:
            yield self._empty(dtype, *(place[dim] for dim in dims))
        leading = [size if has else 1 for size, has in zip(place[:2], kind.blocks, strict=True)]
        rows, columns = ((size + BLOCK - 1) // BLOCK for size in place[2:])
        for n, m in ((rows, columns), (rows, columns), (columns, rows), (columns, rows)):
            yield self._empty(torch.int32, *leading, n)
            yield self._empty(torch.int32, *leading, n, m)

    def _empty(self, dtype: torch.dtype, *shape: Size) -> Tensor:
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=self._kind.device)

    # -- from the functions to what runs
    def _build(self, function: Callable[..., Any], heads: Sequence[Tensor]) -> Run:
        return in_own_thread(partial(self._built, function, heads))

    def _built(self, function: Callable[..., Any], heads: Sequence[Tensor]) -> Run:
        device = self._kind.device  # a new thread begins on the first GPU
        with torch.cuda.device(device.index if device.type == "cuda" else -1):
            gm = self._traced(function, [*heads, *self._rest()])
            if self._options is None:
                return gm
            return begin_body(gm, self._mode, self._options)()

    def _traced(self, function: Callable[..., Any], examples: Sequence[Tensor]) -> fx.GraphModule:
        with self._mode, enable_python_dispatcher(), torch.no_grad():
            gm = make_fx(function)(*map(memory_like, examples))  # a mode traces one as one value
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm


def _same(score: Tensor, *_: Tensor) -> Tensor:
    return score


def attach_flex() -> None:
    """Let ``fxrl::masked_attention`` run FlexAttention on GPUs from now on."""
    attach("cuda", _ON_GPU.forward, _ON_GPU.backward)


#: With fxrl's own options alone: the op serves every step of the process.
_ON_GPU = FlexAttention(InductorOptions.of(None))
