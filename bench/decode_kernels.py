"""The decode step's own kernels: attention over a paged cache, and sampling with log-probabilities.

Each is captured in a CUDA graph that runs it once on each of several data sets, together larger
than the L2 cache (but for the shortest sequences); a time is the median replay over the number of
sets, so it holds the launch gap. ``of_copy``: how long a device copy takes that moves (reads and
writes) as many bytes as must be read, as a share of the time. Peers: PyTorch's SDPA on a dense
cache, and vLLM's FlashAttention 3 and sampler as vLLM 0.25 calls them in its CUDA graphs, where
vLLM is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.lib import common
from fxrl.kernels.decode_attention import decode_attention
from fxrl.kernels.decode_schedule import DecodeSchedule, DecodeWorkspace, schedule_decode
from fxrl.kernels.sample import fused_sample

COLUMNS = ("kernel", "variant", "rows", "length", "us", "floor_us", "of_copy", "error", "failure")
KV_HEADS, DIM, BLOCK, VOCAB = 8, 128, 16, 151936  # Qwen3, 1.7B to 8B
LENGTHS: dict[str, list[int]] = {
    "32 x 1000": [1000] * 32,
    "32 mixed to 1870": [60 * i + 10 for i in range(32)],
    "32 x 300": [300] * 32,
    "32 x 16": [16] * 32,
    "1 x 1000": [1000],
    "1 x 32768": [32768],
    "4 x 8000": [8000] * 4,
    "16 x 32768": [32768] * 16,
    "64 mixed to 6350": [100 * i + 50 for i in range(64)],
    "128 x 1000": [1000] * 128,
    "140 x 1000": [1000] * 140,
    "250, one of 4000": [4000] + [100] * 249,
    "128 x 640, 8 of each 512": [640] * 128,
    "256 x 640, 8 of each 512": [640] * 256,
    "64 x 3584, 8 of each 3072": [3584] * 64,
}
PROMPTS = {
    "128 x 640, 8 of each 512": (8, 512),
    "256 x 640, 8 of each 512": (8, 512),
    "64 x 3584, 8 of each 3072": (8, 3072),
}
"""How many completions a prompt has, and its tokens; elsewhere no two sequences begin alike."""


def main() -> None:
    args = _arguments()
    results = common.results(args, "Kernels of the decode step", COLUMNS, _notes(args))
    bandwidth = copy_bandwidth()
    results.extra["copy_bytes_per_s"] = bandwidth
    for label, lengths in LENGTHS.items():
        if args.only in ("", "attention"):
            _attention(results, label, lengths, bandwidth, args.q_heads)
            common.free_memory("cuda")
    for rows in args.sample_rows:
        if args.only in ("", "sample"):
            _sampling(results, rows, bandwidth)
            common.free_memory("cuda")
    results.finish()


def copy_bandwidth() -> float:
    """Bytes read and written a second by copies of 64 MiB among buffers larger than L2."""
    buffers = [torch.empty(2**26, dtype=torch.uint8, device="cuda") for _ in range(8)]
    work = [lambda i=i: buffers[i].copy_(buffers[(i + 4) % 8]) for i in range(8)]
    return 2 * 2**26 / (graph_us(work) * 1e-6)


def graph_us(work: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Median microseconds of one of the calls, replayed back to back as one CUDA graph."""
    for call in work:  # compiles, and makes what a variant makes once
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    graph.replay()
    return 1e3 * common.median_ms(graph.replay, "cuda", repeats=repeats) / len(work)


def _measure(
    results: common.Results,
    row: dict[str, Any],
    bytes_read: int,
    bandwidth: float,
    work: list[Callable[[], Any]],
    error: Callable[[], float],
) -> None:
    floor = bytes_read / bandwidth * 1e6
    row |= {"floor_us": floor}
    try:
        us = graph_us(work * (4 if floor < 5 else 1))
        row |= {"us": us, "of_copy": floor / us, "error": error()}
    except Exception as failure:  # a peer that cannot run this is a result
        row["failure"] = common.error_text(failure)
    results.add(**row)


def _attention(
    results: common.Results, label: str, lengths: list[int], bandwidth: float, q_heads: int
) -> None:
    copies, prompt = PROMPTS.get(label, (1, 0))
    keys = sum(lengths) - (len(lengths) - len(lengths) // copies) * prompt
    bytes_read = keys * KV_HEADS * DIM * 2 * 2
    count = max(2, min(8, round(1e9 / bytes_read)))
    sets = [_cache(lengths, copies, prompt, seed, q_heads) for seed in range(count)]
    want = _dense(sets[0], lengths)
    for name, variant in _attention_variants(lengths, q_heads):
        outs = [torch.empty_like(data["q"]) for data in sets]
        work = [partial(variant, *pair) for pair in zip(sets, outs, strict=True)]
        error = lambda: ((outs[0].double() - want).norm() / want.norm()).item()  # noqa: B023, E731
        row = {"kernel": "attention", "variant": name, "rows": len(lengths), "length": label}
        _measure(results, row, bytes_read, bandwidth, work, error)


def _cache(
    lengths: list[int], copies: int, prompt: int, seed: int, q_heads: int
) -> dict[str, Tensor]:
    """Random keys and values in blocks in random order, as a server's cache comes to be; ``copies``
    sequences after another begin with the blocks of one prompt."""
    gen = torch.Generator("cuda").manual_seed(seed)
    counts = [-(-n // BLOCK) for n in lengths]
    total = sum(counts)
    shape = (total, 2, BLOCK, KV_HEADS, DIM)
    cache = torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(total, generator=gen, device="cuda", dtype=torch.int32)
    table = torch.zeros(len(lengths), 2048, dtype=torch.int32, device="cuda")
    for row, blocks in enumerate(order.split(counts)):
        table[row, : len(blocks)] = blocks
        table[row, : prompt // BLOCK] = table[row // copies * copies, : prompt // BLOCK]
    query = (len(lengths), q_heads, DIM)
    return {
        "q": torch.randn(query, generator=gen, device="cuda", dtype=torch.bfloat16),
        "k": cache[:, 0],
        "v": cache[:, 1],
        "table": table,
        "lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "starts": torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
    }


def _dense(data: dict[str, Tensor], lengths: list[int]) -> Tensor:
    out = []
    for row, length in enumerate(lengths):
        blocks = data["table"][row, : -(-length // BLOCK)].long()
        k, v = (data[n][blocks].flatten(0, 1)[:length].double() for n in "kv")
        q = data["q"][row].double().view(KV_HEADS, -1, DIM)
        p = (torch.einsum("hgd,nhd->hgn", q, k) * DIM**-0.5).softmax(-1)
        out.append(torch.einsum("hgn,nhd->hgd", p, v).flatten(0, 1))
    return torch.stack(out)


def _attention_variants(
    lengths: list[int], q_heads: int
) -> Iterator[tuple[str, Callable[[dict[str, Tensor], Tensor], Any]]]:
    space = DecodeWorkspace(len(lengths), q_heads, KV_HEADS, DIM, torch.device("cuda"))
    schedules: dict[int, DecodeSchedule] = {}

    def ours(data: dict[str, Tensor], out: Tensor) -> Any:
        tables = data["table"], data["lens"]
        if id(data) not in schedules:  # one for all layers of a step
            schedules[id(data)] = schedule_decode(data["q"], data["k"], *tables, workspace=space)
        return decode_attention(
            data["q"], data["k"], data["v"], *tables, DIM**-0.5, out,
            workspace=space, schedule=schedules[id(data)],
        )  # fmt: skip

    yield "fxrl", ours
    if len(set(lengths)) == 1:
        yield "sdpa, dense cache", _sdpa(lengths)
    if importlib.util.find_spec("vllm") is not None:
        for splits in (32, 1):
            yield (
                f"vLLM FlashAttention 3, at most {splits} splits",
                _flash(lengths, splits, q_heads),
            )


def _sdpa(lengths: list[int]) -> Callable[[dict[str, Tensor], Tensor], Any]:
    dense: dict[int, tuple[Tensor, Tensor]] = {}

    def run(data: dict[str, Tensor], out: Tensor) -> Any:
        if id(data) not in dense:  # made by the first call of each set, which is not timed
            blocks = data["table"][:, : -(-lengths[0] // BLOCK)].long()
            dense[id(data)] = tuple(
                data[n][blocks].flatten(1, 2)[:, : lengths[0]].transpose(1, 2).contiguous()
                for n in "kv"
            )
        k, v = dense[id(data)]
        got = torch.nn.functional.scaled_dot_product_attention(
            data["q"].unsqueeze(2), k, v, enable_gqa=True
        )
        return out.copy_(got.squeeze(2))

    return run


def _flash(
    lengths: list[int], splits: int, q_heads: int
) -> Callable[[dict[str, Tensor], Tensor], Any]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    longest = max(lengths)
    plans: dict[int, Tensor] = {}

    def run(data: dict[str, Tensor], out: Tensor) -> Any:
        if id(data) not in plans:  # vLLM makes it once a step, for all layers
            plans[id(data)] = get_scheduler_metadata(
                batch_size=len(lengths), max_seqlen_q=1, max_seqlen_k=longest,
                num_heads_q=q_heads, num_heads_kv=KV_HEADS, headdim=DIM,
                cache_seqlens=data["lens"], qkv_dtype=torch.bfloat16,
                cu_seqlens_q=data["starts"], page_size=BLOCK, causal=True, num_splits=splits,
            )  # fmt: skip
        return flash_attn_varlen_func(
            data["q"], data["k"], data["v"], out=out, max_seqlen_q=1,
            cu_seqlens_q=data["starts"], max_seqlen_k=longest, seqused_k=data["lens"],
            softmax_scale=DIM**-0.5, causal=True, block_table=data["table"],
            scheduler_metadata=plans[id(data)], num_splits=splits, fa_version=3,
        )  # fmt: skip

    return run


def _sampling(results: common.Results, rows: int, bandwidth: float) -> None:
    bytes_read = rows * VOCAB * 2
    logits = [
        torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16) * 3
        for _ in range(max(2, round(2e8 / bytes_read)))
    ]
    temperature = torch.ones(rows, device="cuda")
    index = torch.arange(rows, device="cuda")
    last: list[tuple[Tensor, Tensor]] = [(index, temperature)]

    def ours(x: Tensor) -> None:
        last[0] = fused_sample(x, temperature, index, index)

    def eager(x: Tensor) -> None:
        logps = x.float().log_softmax(-1)
        tokens = (logps - torch.empty_like(logps).exponential_().log()).argmax(-1)
        last[0] = tokens, logps.gather(1, tokens.unsqueeze(1)).squeeze(1)

    variants = {"fxrl": ours, "eager PyTorch": eager}
    if importlib.util.find_spec("vllm") is not None:
        variants["vLLM"] = _vllm_sampler(temperature, index, last)
    for name, variant in variants.items():
        work = [partial(variant, x) for x in logits]

        def error() -> float:
            tokens, logprobs = last[0]
            torch.cuda.synchronize()
            want = logits[-1].double().log_softmax(-1).gather(1, tokens.view(-1, 1))
            return (logprobs.double().view(-1, 1) - want).abs().max().item()

        row = {"kernel": "sample", "variant": name, "rows": rows, "length": f"vocab {VOCAB}"}
        _measure(results, row, bytes_read, bandwidth, work, error)


def _vllm_sampler(
    temperature: Tensor, index: Tensor, last: list[tuple[Tensor, Tensor]]
) -> Callable[[Tensor], None]:
    """What vLLM's sampler launches if ``logprobs=0``: copy, draw, log-prob, rank."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_logprobs

    def run(x: Tensor) -> None:
        wide = torch.empty_like(x, dtype=torch.float32).copy_(x)
        tokens = gumbel_sample(wide, index, temperature, index, index, apply_temperature=False)
        last[0] = tokens, compute_topk_logprobs(wide, 0, tokens).logprobs

    return run


def _notes(args: argparse.Namespace) -> list[str]:
    return [
        f"{args.q_heads} query and {KV_HEADS} KV heads of {DIM}, blocks of {BLOCK}, bf16; "
        f"vocabulary {VOCAB}",
        "error: relative L2 distance to float64 attention; largest error of a log-probability",
        "attention's schedules are made outside the timing: they are made once a step",
        "of_copy counts a prompt's keys once, whoever reads them",
    ]


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", choices=("", "attention", "sample"))
    parser.add_argument("--q-heads", default=16, type=common.positive, help="8B has 32")
    parser.add_argument("--sample-rows", default=[32, 256], type=common.numbers)
    return parser.parse_args()


if __name__ == "__main__":
    main()
