"""How many rows and vocabulary entries a step of the fused head takes.

The model: a device with P multiprocessors makes 128 x 256 tiles of a product in waves of P, each
as long as the product is deep; a wave that is not full costs as much as a full one. A step's
exponentials [R, C] and the float32 sums [R, H] must fit the scratch budget; small steps pay for
filling and draining the pipeline and for reading the sums back.

Constants measured on an H200 at the clocks it holds under load; they only rank plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from fxrl.kernels.hopper.module import TILE_DEPTH, TILE_ROWS, TILE_VOCAB

_ROW_STEP = 256  # two blocks of a cluster
_MAX_ROWS = 8192
_STEP_US = 0.70  # 128 x 256 x 64 on one multiprocessor
_EPILOGUE_US = 2.0
_LAUNCH_US = 8.0
_BYTES_PER_US = 4.2e6
_WEIGHT_READ = 0.5  # of the time to read the weight does not hide behind the products
_SUMS_READ = 2.0  # read and write of the sums: they hide even less, at a step's end
_SCRATCH_BYTES = 176 * 2**20
_CACHED_BYTES = 20 * 2**20  # of hidden rows, that stay in the L2 cache while the weight goes by
_BLOCK_STATISTICS_BYTES = 20
_GRADIENT_BYTES = 256 * 2**20
_MAX_GRADIENT_ROWS = 2**15
_MAX_LAUNCH_ROWS = 2**14


@dataclass(frozen=True, slots=True)
class TilePlan:
    """``rows`` of the batch at a time, and of them ``vocab`` entries at a time."""

    rows: int
    vocab: int


@lru_cache(maxsize=1024)
def for_scoring(num_rows: int, width: int, vocab: int, multiprocessors: int) -> TilePlan:
    """Statistics only: as many rows as the weight is worth reading for, in full waves."""
    blocks = _ceil(vocab, TILE_VOCAB)
    limit = min(
        _SCRATCH_BYTES // (blocks * _BLOCK_STATISTICS_BYTES),
        _CACHED_BYTES // (2 * width),
        _MAX_LAUNCH_ROWS,
    )

    weight_read = _WEIGHT_READ * 2 * vocab * width / _BYTES_PER_US

    def cost(rows: int) -> float:
        def step(count: int) -> float:
            return _waves(count, blocks, multiprocessors) * _wave(width) + weight_read + _LAUNCH_US

        return _steps(num_rows, rows, step)

    return TilePlan(min(_row_choices(num_rows, limit), key=cost), blocks * TILE_VOCAB)


@lru_cache(maxsize=1024)
def for_product(num_rows: int, width: int, vocab: int, multiprocessors: int) -> TilePlan:
    """A tile of the head, then its product with the weight, added to sums of float32."""
    blocks = _ceil(vocab, TILE_VOCAB)

    def cost(plan: TilePlan) -> float:
        def step(rows: int) -> float:
            chunks = _ceil(vocab, plan.vocab)
            # Every chunk but the last ends in a wave of its own.
            tiles = plan.vocab // TILE_VOCAB
            waves = (chunks - 1) * _waves(rows, tiles, multiprocessors)
            waves += _waves(rows, blocks - (chunks - 1) * tiles, multiprocessors)
            head = waves * _wave(width)
            product = _product(rows, vocab, width, multiprocessors)
            sums = chunks * _SUMS_READ * 8 * rows * width / _BYTES_PER_US
            weight_reads = 2 * _WEIGHT_READ * 2 * vocab * width / _BYTES_PER_US
            return head + product + sums + weight_reads + 2 * chunks * _LAUNCH_US

        return _steps(num_rows, plan.rows, step)

    return min(_plans(num_rows, width, vocab), key=cost)


@lru_cache(maxsize=1024)
def for_gradient(num_rows: int, width: int, vocab: int, multiprocessors: int) -> TilePlan:
    """The logits' gradient of a trainable head, and dH and dW of it.

    Float32 sums are read and written for each chunk of the vocabulary (dH's [R, H]) and for each
    of several row pieces (dW's [C, H]; a single piece is rounded at once).
    """

    def cost(rows: int) -> float:
        entries = gradient_vocab(rows, vocab)
        pieces, chunks = _ceil(num_rows, rows), _ceil(vocab, entries)
        waves = _waves(rows, entries // TILE_VOCAB, multiprocessors)
        head = waves * _wave(width)
        products = _product(rows, entries, width, multiprocessors)
        products += _product(entries, rows, width, multiprocessors)
        sums = num_rows * chunks + (vocab * pieces if pieces > 1 else 0)
        return pieces * chunks * (head + products) + _SUMS_READ * 8 * sums * width / _BYTES_PER_US

    rows = min(_row_choices(num_rows, _MAX_GRADIENT_ROWS), key=cost)
    return TilePlan(rows, gradient_vocab(rows, vocab))


def gradient_vocab(rows: int, vocab: int) -> int:
    """Entries of the vocabulary that ``for_gradient`` takes with so many rows, in whole tiles."""
    most = _GRADIENT_BYTES // (2 * rows) // TILE_VOCAB
    return min(max(4, most), _ceil(vocab, TILE_VOCAB)) * TILE_VOCAB


def launch_rows(width: int) -> int:
    """Hidden rows of a launch, so that they stay in the L2 cache while the weight goes by."""
    fitting = _CACHED_BYTES // (2 * width) // _ROW_STEP * _ROW_STEP
    return max(4096, min(_MAX_LAUNCH_ROWS, fitting))


def _plans(num_rows: int, width: int, vocab: int) -> Iterator[TilePlan]:
    blocks = _ceil(vocab, TILE_VOCAB)
    found = False
    for rows in _row_choices(num_rows, _MAX_ROWS):
        left = _SCRATCH_BYTES - rows * (4 * width + blocks * _BLOCK_STATISTICS_BYTES)
        most = min(blocks, left // (2 * TILE_VOCAB * rows))
        for chunks in range(_ceil(blocks, most), _ceil(blocks, most) + 12) if most > 0 else ():
            found = True
            yield TilePlan(rows, _ceil(blocks, chunks) * TILE_VOCAB)
    if not found:
        yield TilePlan(_ROW_STEP, min(blocks, 32) * TILE_VOCAB)


def _row_choices(num_rows: int, most: int) -> list[int]:
    """Multiples of ``_ROW_STEP`` that cut the rows into equal parts; no rows are as few as one."""
    num_rows = max(1, num_rows)
    parts = range(1, _ceil(num_rows, _ROW_STEP) + 1)
    sizes = {_ceil(_ceil(num_rows, n), _ROW_STEP) * _ROW_STEP for n in parts}
    return sorted(size for size in sizes if size <= most) or [_ROW_STEP]


def _steps(num_rows: int, rows: int, cost: Callable[[int], float]) -> float:
    full, rest = divmod(num_rows, rows)
    return full * cost(rows) + (cost(rest) if rest else 0.0)


def _waves(rows: int, vocab_tiles: int, multiprocessors: int) -> int:
    return _ceil(_ceil(rows, _ROW_STEP) * vocab_tiles, multiprocessors // 2)


def _wave(width: int) -> float:
    """Microseconds of one tile of the head on each multiprocessor."""
    return _ceil(width, TILE_DEPTH) * _STEP_US + _EPILOGUE_US


def _product(rows: int, depth: int, width: int, multiprocessors: int) -> float:
    """Microseconds of ``[rows, depth] @ [depth, width]``."""
    outputs = _ceil(rows, TILE_ROWS) * _ceil(width, TILE_VOCAB)
    return _ceil(outputs, multiprocessors) * _ceil(depth, TILE_DEPTH) * _STEP_US


def whole_tiles(num_rows: int) -> int:
    """Rounded up to what a cluster makes at once."""
    return _ceil(num_rows, _ROW_STEP) * _ROW_STEP


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
