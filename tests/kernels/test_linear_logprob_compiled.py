"""The head's kernels compile for a Hopper GPU, without one: what the interpreter cannot see."""

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fxrl.kernels.hopper import rows
from fxrl.kernels.linear_logprob import tile

INTEGERS = {"vocab", "rows", "pitch", "all_rows", "width", "blocks", "moments", "share"}
POINTERS = {"target": "*i64", "row_index": "*i64"}
TILE = {"lowest": -3e38, "splits": 38, "splits_block": 64, "partials": 6, "block": 4096}
VARIANTS = [
    {"scale": 1.0, "softcap": 0.0, "has_bias": False, "has_temperature": False},
    {"scale": 0.5, "softcap": 30.0, "has_bias": True, "has_temperature": True},
]


def is_integer(name):
    return name in INTEGERS or name.rsplit("_")[-1] in ("stride", "count", "row", "column")


def compiled(kernel, narrow, constants, ones=False):
    """PTX for sm_90; arguments in ``narrow`` point to bf16, other tensors to float32.

    With ``ones`` every integer is 1, which Triton makes a constant: no tensor in the kernel.
    """
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    if ones:
        kept = {kernel.arg_names[p.num] for p in kernel.params if p.do_not_specialize}
        constants |= {k: 1 for k in kernel.arg_names if is_integer(k) and k not in kept}

    def kind(name):
        if name in constants:
            return "constexpr"
        if is_integer(name):
            return "i32"
        return POINTERS.get(name, "*bf16" if name in narrow else "*fp32")

    aligned = [i for i, name in enumerate(kernel.arg_names) if kind(name) != "constexpr"]
    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.metadata.shared <= 227 * 1024
    return made.asm["ptx"]


@pytest.mark.parametrize("ones", [False, True], ids=["sizes", "ones"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "everything"])
def test_passes_over_a_tile(variant, ones):
    more = variant["has_bias"]
    options = {**TILE, **variant, "wants_weighted": more}
    for name, columns in (
        ("partial_statistics", 0),
        ("combine_statistics", 7),
        ("probabilities", 0),
        ("gradient", 10),
    ):
        kernel = getattr(tile, name)
        assert compiled(kernel, {"prob", "grad"}, {**options, "columns": columns}, ones)


@pytest.mark.parametrize("ones", [False, True], ids=["sizes", "ones"])
def test_passes_over_the_rows_on_hopper(ones):
    narrow = {"hidden", "weight", "vectors"}
    blocks = {"tile_vocab": 256, "block_rows": 32, "block_blocks": 64}
    assert compiled(rows.combine_blocks, narrow, blocks, ones)
    for cap, has_bias in ((0.0, False), (30.0, True)):
        options = {"cap": cap, "has_bias": has_bias, "block": 1024}
        assert compiled(rows.target_logits, narrow, options, ones)
        sizes = {"block_rows": 16, "block_vocab": 64, "block_depth": 64}
        options = {"cap": cap, "has_bias": has_bias, **sizes, "block": 512}
        assert compiled(rows.mend_product, narrow, options, ones)
        assert compiled(rows.mend_exponentials, {*narrow, "exponentials"}, options, ones)
    for capped in (False, True):
        options = {"logprob_at": 0, "lse_at": 1, "capped": capped, "block": 1024}
        assert compiled(rows.finish_vectors, narrow, options, ones)


def test_picking_rows_reads_sixteen_bytes_at_once():
    made = compiled(tile.picked_rows, {"matrix", "out"}, {"block": 4096, "stride": 151936})
    assert "ld.global.v4" in made


def test_the_scaling_reads_sixteen_bytes_at_once():
    narrow, options = {"vectors", "out"}, {"count": 2, "block": 4096, "vectors_column": 1}
    assert "ld.global.v4" in compiled(tile.scaled_sum, narrow, options)
    assert compiled(tile.scaled_sum, narrow, options, ones=True)
