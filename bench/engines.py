"""An engine on each GPU beside one over all of them: tokens a second of plain vLLM.

The same prompts and as many tokens, greedy, EOS ignored: N engines of one GPU (``tensor`` 1) draw
them at once, as ``fxrl train`` does, then one engine with ``tensor_parallel_size`` N. Weights are
random and prompts token ids, so that nothing is downloaded. A row is an engine, its tokens a second
its own; ``of_all`` are those of all engines, together from when the first begins to when the last
ends.

    fxrl bench engines --gpus 2 --shape qwen3-1.7b --rows 32 --tokens 1024

Exit code 1: an engine failed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.lib import child, common, qwen, rl_job

COLUMNS = (
    "tensor",
    "engine",
    "sequences",
    "draw_s",
    "draw_s_max",
    "tokens_per_s",
    "of_all",
    "beside",
    "init_s",
    "error",
)
#: NVLink's multicast is left alone: a program that ends in it may leave the fabric unusable.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
}
_WAIT_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see above for what is returned."""
    args = _arguments(argv)
    if args.worker:
        _draw(args, *args.worker)
        return 0
    notes = [
        f"layers of {args.shape}'s shape: {args.layers or 'all'}, random weights, bf16; greedy, "
        f"{args.prompt} prompt tokens and {args.tokens} more, {args.rows} sequences a GPU",
        "tensor: GPUs of an engine; of_all: tokens a second of all engines that draw at once; "
        "beside: that over what one engine a GPU reaches",
    ]
    results = common.results(args, "An engine a GPU, or one over all", COLUMNS, notes)
    rl_job.write_shape(args.work, args.shape, args.layers)
    alone: float | None = None
    for tensor in sorted({1, args.gpus}):
        rows = list(_rows(args, tensor, sys.argv[1:] if argv is None else argv))
        if not any("error" in row for row in rows):
            begun, ended = zip(*(row.pop("span") for row in rows), strict=True)
            drawn = args.rows * args.gpus * args.tokens * args.repeats
            of_all = drawn / (max(ended) - min(begun))
            alone = alone or of_all
            rows = [row | {"of_all": of_all, "beside": of_all / alone} for row in rows]
        for number, row in enumerate(rows):
            row.pop("span", None)
            results.add(tensor=tensor, engine=number, **row)
    results.finish()
    return int(results.failed())


def _rows(args: argparse.Namespace, tensor: int, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What engines of so many GPUs each tell, which all draw at once."""
    count = args.gpus // tensor
    with tempfile.TemporaryDirectory() as lobby, ThreadPoolExecutor(count) as pool:

        def measured(number: int) -> dict[str, Any]:
            gpus = range(number * tensor, (number + 1) * tensor)
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
            own = ["--worker", str(tensor), str(count), lobby]
            return child.measured(
                ["-m", "bench.engines", *words, *own],
                environment=os.environ | rl_job.VLLM_ENVIRONMENT | _ENVIRONMENT | shown,
                limit_s=args.time_limit,
            )

        yield from pool.map(measured, range(count))


def _draw(args: argparse.Namespace, tensor: str, count: str, lobby: str) -> None:
    """One engine: its share of the sequences, once to warm up, then when all engines are ready."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    engine = LLM(
        args.work,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=int(tensor),
        max_model_len=args.prompt + args.tokens,
        max_num_seqs=args.rows * args.gpus,
        gpu_memory_utilization=0.8,
        seed=0,
    )
    init_s = time.perf_counter() - start
    draw = torch.Generator().manual_seed(os.getpid())
    sizes = (args.rows * int(tensor), args.prompt)
    prompts = [
        {"prompt_token_ids": ids} for ids in torch.randint(3, 1000, sizes, generator=draw).tolist()
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )

    def seconds() -> float:
        begun = time.perf_counter()
        made = engine.generate(prompts, params, use_tqdm=False)
        drawn = sum(len(one.outputs[0].token_ids) for one in made)
        assert drawn == len(prompts) * args.tokens
        return time.perf_counter() - begun

    seconds()
    _meet(Path(lobby), int(count))
    begun = time.monotonic()  # of the host's clock, which all of its processes share
    times = [seconds() for _ in range(args.repeats)]
    middle = statistics.median(times)
    found = {"sequences": len(prompts), "draw_s": middle, "draw_s_max": max(times)}
    found |= {"tokens_per_s": len(prompts) * args.tokens / middle, "init_s": init_s}
    child.tell(found | {"span": [begun, time.monotonic()]})


def _meet(lobby: Path, count: int) -> None:
    """Waits until so many processes are here."""
    (lobby / str(os.getpid())).touch()
    until = time.monotonic() + _WAIT_S
    while len(list(lobby.iterdir())) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"not all of {count} engines were ready within {_WAIT_S:g} s")
        time.sleep(0.01)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--gpus", type=common.positive, default=2)
    shapes = [name for name in qwen.SHAPES if name in ("qwen3-1.7b", "qwen3-8b", "tiny")]
    parser.add_argument("--shape", default="qwen3-1.7b", choices=shapes)
    parser.add_argument("--layers", type=common.positive, help="fewer than the shape has")
    parser.add_argument("--rows", type=common.positive, default=32, help="sequences a GPU")
    parser.add_argument("--prompt", type=common.positive, default=64)
    parser.add_argument("--tokens", type=common.positive, default=1024, help="drawn of each")
    parser.add_argument("--repeats", type=common.positive, default=3)
    parser.add_argument("--work", default="/tmp/fxrl-engines", help="folder of the model's config")
    parser.add_argument("--time-limit", type=float, default=420, help="seconds for each engine")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
