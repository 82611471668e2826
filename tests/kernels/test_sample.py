"""``fused_sample``: compiled on a GPU (``test_interpreted.py``: without); its argument checks."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fxrl.kernels.sample import FusedSampleError, fused_sample

sys.path.insert(0, str(Path(__file__).parent))
import sample_cases as cases


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.FLOATS, ids=str)
def test_values_on_gpu(dtype):
    for rows, vocab in ((0, 7), (1, 1), (7, 33), (32, 151936), (257, 50257), (3, 262145)):
        cases.check_values(rows, vocab, dtype, "cuda", stride=rows % 5)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_distribution_on_gpu(temperature):
    logits = torch.randn(9001, generator=torch.Generator().manual_seed(2)) * 3
    cases.check_distribution(logits, temperature, 2_000_000, 65535, "cuda")


@pytest.mark.gpu
def test_rare_tokens_keep_their_odds_on_gpu():
    """One token of probability 0.89, 1000 of 1e-4 and 10000 of 1e-6, shuffled over the blocks."""
    p = torch.cat([torch.tensor([0.89]), torch.full((1000,), 1e-4), torch.full((10000,), 1e-6)])
    p = p[torch.randperm(len(p), generator=torch.Generator().manual_seed(3))].double()
    counts = cases.check_distribution((p / p.sum()).log().float(), 1.0, 4_000_000, 65535, "cuda")
    rare = counts[p < 1e-5].sum().item()
    assert abs(rare - 40_000) < 4 * 200


@pytest.mark.gpu
def test_independence_and_special_rows_on_gpu():
    cases.check_independence(65000, "cuda")
    cases.check_special("cuda")


@pytest.mark.gpu
def test_cuda_graph_reads_what_its_buffers_hold():
    logits = torch.randn(33, 151936, device="cuda", dtype=torch.bfloat16)
    temperature = torch.ones(33, device="cuda")
    seeds = torch.arange(33, device="cuda")
    positions = torch.zeros(33, dtype=torch.int64, device="cuda")
    fused_sample(logits, temperature, seeds, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = fused_sample(logits, temperature, seeds, positions)
    for step in range(3):
        logits.normal_()
        positions.fill_(step)
        temperature.fill_(0.5 * step)
        graph.replay()
        want = fused_sample(logits, temperature, seeds, positions)
        assert torch.equal(tokens, want[0])
        assert torch.equal(logprobs, want[1])


def arguments(**changes):
    made = {
        "logits": torch.zeros(2, 6),
        "temperature": torch.ones(2),
        "seeds": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
    }
    return made | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 6, dtype=torch.float64)}, "float64"),
        ({"logits": torch.zeros(2, 0)}, r"V >= 1"),
        ({"logits": torch.zeros(6, 2).t()}, "stride 2"),
        ({"logits": torch.zeros(1, 1).expand(70000, 6).contiguous()}, "70000 rows"),
        ({"temperature": torch.ones(3)}, r"temperature \(3,\)"),
        ({"temperature": torch.ones(4)[::2]}, "contiguous"),
        ({"seeds": torch.zeros(2)}, "int64"),
        ({"positions": torch.zeros(2, 1, dtype=torch.int64)}, r"positions \(2, 1\)"),
        ({"state_rows": torch.zeros(3, dtype=torch.int64)}, r"state_rows \(3,\)"),
        ({"seeds": torch.zeros(2, dtype=torch.int64, device="meta")}, "meta"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(FusedSampleError, match=message):
        fused_sample(**arguments(**changes))
