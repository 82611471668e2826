"""``decode_attention``: compiled on a GPU (``test_interpreted.py``: without); argument checks."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fxrl.kernels.decode_attention import decode_attention
from fxrl.kernels.decode_schedule import DecodeAttentionError, DecodeTuning, DecodeWorkspace

sys.path.insert(0, str(Path(__file__).parent))
import decode_cases as cases

MIXED = [1000, 0, 1, 16, 17, 4099, 63, 64, 65, 0, 257]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(16, 8, 128), (12, 2, 64), (8, 8, 256), (16, 1, 96), (64, 2, 80)], ids=str
)
def test_heads_on_gpu(sizes):
    q_heads, kv_heads, dim = sizes
    for layout, dtype in itertools.product(("NHD", "HND"), (torch.bfloat16, torch.float16)):
        case = cases.make_case(
            MIXED, q_heads=q_heads, kv_heads=kv_heads, dim=dim, dtype=dtype, layout=layout,
            device="cuda",
        )  # fmt: skip
        cases.check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"window": 513, "softcap": 8.0}], ids=str)
def test_options_on_gpu(block_size, options):
    for lengths in (MIXED, [32768], [1], [0], [500] * 130):
        case = cases.make_case(
            lengths, q_heads=8, kv_heads=4, dim=128, block_size=block_size, device="cuda"
        )
        cases.check(case, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 513, "softcap": 8.0}], ids=str)
def test_caches_in_fp8_on_gpu(dtype, options):
    for layout in ("NHD", "HND"):
        case = cases.make_case(
            MIXED, q_heads=16, kv_heads=4, dim=128, dtype=dtype, layout=layout, device="cuda",
            cached=torch.float8_e4m3fn,
        )  # fmt: skip
        cases.check(case, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "spared"),
    [
        ((8, 4), 4 * 96 + 2 * 64),
        ((8, 2), 3 * 96 + 2 * 64),
        ((10, 2), 3 * 96 + 2 * 64),
        ((32, 2), 0),
    ],
)
def test_prefixes_on_gpu(heads, spared):
    cases.check_prefixes(*heads, spared, dim=128, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(32, 8, 128), (4, 4, 64), (14, 2, 128)], ids=str)
def test_completions_of_prompts_on_gpu(sizes):
    """8 of each of 20 prompts, of which two are alike for a while, at places of their own."""
    gen = torch.Generator().manual_seed(3)
    blocks = [int(n) for n in torch.randint(0, 40, (20,), generator=gen)]
    blocks[5] = max(blocks[5], blocks[4])
    lengths = [
        blocks[i % 20] * 16 + int(torch.randint(1, 300, (), generator=gen)) for i in range(160)
    ]
    prefixes = [(i, i % 20, blocks[i % 20]) for i in range(20, 160)] + [(5, 4, blocks[4] // 2)]
    q_heads, kv_heads, dim = sizes
    case = cases.make_case(
        lengths, q_heads=q_heads, kv_heads=kv_heads, dim=dim, prefixes=prefixes, device="cuda"
    )
    cases.check(case)
    assert cases.keys_read(case) < sum(lengths) * 0.8


@pytest.mark.gpu
def test_any_cut_of_the_work_on_gpu():
    case = cases.make_case(MIXED, q_heads=16, kv_heads=8, dim=128, device="cuda")
    for per_sm, max_tiles, min_tiles in itertools.product((1, 3), (1, 8), (1, 9)):
        tuning = DecodeTuning(programs_per_sm=per_sm, max_tiles=max_tiles, min_tiles=min_tiles)
        cases.check(case, tuning=tuning)


@pytest.mark.gpu
def test_cuda_graph_replays_with_other_lengths():
    case = cases.make_case([900, 31, 512, 2000], q_heads=16, kv_heads=8, dim=128, device="cuda")
    space = DecodeWorkspace(4, 16, 8, 128, torch.device("cuda"))
    decode_attention(*case.tensors(), 0.1, workspace=space)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*case.tensors(), 0.1, workspace=space)
    full = case.seq_lens.clone()
    for shares in ((1, 1, 1, 1), (0.5, 0, 1, 0.01), (0, 0, 0, 1)):
        case.seq_lens.copy_((full * torch.tensor(shares, device="cuda")).int())
        graph.replay()
        lengths = case.seq_lens.tolist()
        cut = cases.dataclasses.replace(
            case,
            keys=[k[:n] for k, n in zip(case.keys, lengths, strict=True)],
            values=[v[:n] for v, n in zip(case.values, lengths, strict=True)],
        )
        want = cases.reference(cut, 0.1)
        torch.testing.assert_close(out.double().cpu(), want, rtol=2**-7, atol=2**-6)


def arguments(**changes):
    made = {
        "q": torch.zeros(2, 4, 64, dtype=torch.bfloat16),
        "k_cache": torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16),
        "v_cache": torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "scale": 1.0,
    }
    return made | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 64)}, "float32"),
        ({"q": torch.zeros(2, 4, 257, dtype=torch.bfloat16)}, "257"),
        ({"q": torch.zeros(2, 64, 4, dtype=torch.bfloat16).mT}, "q has stride"),
        ({"q": torch.zeros(2, 3, 64, dtype=torch.bfloat16)}, "no multiple"),
        ({"k_cache": torch.zeros(5, 16, 2, 32, dtype=torch.bfloat16)}, "k_cache"),
        ({"v_cache": torch.zeros(5, 16, 1, 64, dtype=torch.bfloat16)}, "v_cache"),
        ({"v_cache": torch.zeros(5, 16, 2, 64, dtype=torch.float16)}, "v_cache"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int64)}, "int64"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32)}, "2 rows"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")}, "meta"),
        ({"out": torch.zeros(2, 4, 32, dtype=torch.bfloat16)}, "as q"),
        ({"window": -1}, "window=-1"),
        ({"workspace": DecodeWorkspace(1, 4, 2, 64, torch.device("cpu"))}, "do not fit"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(DecodeAttentionError, match=message):
        decode_attention(**arguments(**changes))
