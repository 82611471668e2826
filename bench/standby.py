"""vLLM and a trainer on one GPU: what standby, shared weights and LoRA hand-over cost.

Qwen3-1.7B's shape with random weights. One engine and one LoRA model made of its weights:

    standby     the KV cache is released and mapped again, cycle after cycle; 32 greedy sequences
                before and after, the freed memory filled with NaN patterns in between
    weights     GPU memory of trainer and engine without the KV cache, beside weights + LoRA +
                optimizer state
    fold        LoRA into the shared weights and back, verified; slots: into vLLM's own LoRA slots
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.lib import common, rl_job

COLUMNS = ("what", "median", "max", "unit", "asked", "note")
GREEDY_TOKENS = 256


def main() -> None:
    args = _arguments()
    from fxrl.engines.vllm.engine import VllmEngine
    from fxrl.engines.vllm.options import VllmOptions
    from fxrl.models import lora

    notes = ["Qwen3-1.7B shape, random bf16 weights, LoRA r=32 on all linear layers"]
    title = "vLLM standby, shared weights, LoRA hand-over"
    results = common.results(args, title, COLUMNS, notes)
    path = rl_job.make_model(Path(args.work))
    context = torch.cuda.mem_get_info()
    options = VllmOptions(
        max_model_len=2304,
        max_num_seqs=args.sequences,
        max_lora_rank=rl_job.RANK if args.slots else None,
        max_num_batched_tokens=8192,
        compilation_config={"cudagraph_mode": args.graphs} if args.graphs else None,
    )
    start = time.perf_counter()
    engine = VllmEngine(path, options, eos_token_ids=2)
    results.notes.append(f"engine built in {time.perf_counter() - start:.1f} s")
    results.notes.append(f"vLLM's CUDA graphs: {_graphs(engine)}")
    model, report = engine.shared_model()
    results.add(
        what="parameters shared",
        median=100.0 * report.shared_bytes / (report.shared_bytes + report.copied_bytes),
        unit="% of bytes",
        asked="100",
        note=f"every alias compared with the checkpoint, {report.seconds:.2f} s",
    )
    model = lora(model, rl_job.RANK, rl_job.RANK, "all-linear", dropout=0.0, seed=0)
    engine.attach(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    _one_update(model, optimizer)
    _memory(results, engine, model, optimizer, context)
    _standby(results, engine, args)
    _hand_over(results, engine, model, args)
    results.extra["ledger"] = str(engine.ledger).splitlines()
    print(engine.ledger)
    results.finish()
    engine.close()


def _graphs(engine: Any) -> str:
    """What vLLM captured, in words."""
    config = engine._handle.engine.vllm_config.compilation_config
    return f"{config.cudagraph_mode.name}, sizes {config.cudagraph_capture_sizes}"


def _one_update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Optimizer state exists from the first update on."""
    ids = torch.randint(0, 1000, (1, 128), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _memory(
    results: common.Results, engine: Any, model: Any, optimizer: Any, context: tuple[int, int]
) -> None:
    """Everything on the GPU but the KV cache, beside what one copy of everything needs."""
    common.free_memory("cuda")
    now = engine.ledger.record("memory")
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    adapter = [p for p in model.parameters() if p.requires_grad]
    base = [p for p in model.parameters() if not p.requires_grad]
    need = sum(t.numel() * t.element_size() for t in [*base, *adapter, *state])
    tensors = now.weights + now.trainer
    driver = context[0] - torch.cuda.mem_get_info()[0] - now.kv_cache
    for what, held, note in (
        ("tensors of trainer and engine without KV", tensors, "weights pool + trainer's tensors"),
        (
            "the same with graphs and workspace",
            tensors + now.engine_other,
            "cuBLAS workspaces, vLLM's buffers and graphs too",
        ),
        ("the same, driver's count", driver, "and all that CUDA and libraries took since start"),
    ):
        results.add(
            what=what,
            median=100.0 * (held / need - 1),
            unit="% over weights + LoRA + optimizer",
            asked="5",
            note=f"{note}: {held / 2**30:.3f} GiB of {need / 2**30:.3f} GiB",
        )


def _standby(results: common.Results, engine: Any, args: argparse.Namespace) -> None:
    from fxrl.engines import SamplingParams

    prompts = [list(range(5 + i, 25 + i)) for i in range(32)]
    greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    reference = engine.generate(prompts, greedy)
    release, wake = [], []
    with engine.standby():  # the first cycle also fills the freed memory with NaN patterns
        free = torch.cuda.mem_get_info()[0]
        dirt = torch.empty(int(free * 0.9), dtype=torch.uint8, device="cuda").fill_(255)
        del dirt
        torch.cuda.empty_cache()
    kv_bytes = engine.ledger.entries("wake")[-1].kv_cache
    same = _same(reference, engine.generate(prompts, greedy))
    free_before = torch.cuda.mem_get_info()[0]
    for _ in range(args.cycles):
        with engine.standby():
            pass
        release.append(engine.timings["release"])
        wake.append(engine.timings["wake"])
    grown = free_before - torch.cuda.mem_get_info()[0]
    after = _same(reference, engine.generate(prompts, greedy))
    size = f"{kv_bytes / 2**30:.1f} GiB of KV cache"
    for name, times, asked in (("release", release, "0.05"), ("wake", wake, "0.6")):
        results.add(
            what=f"KV-only {name}",
            median=statistics.median(times),
            max=max(times),
            unit="s",
            asked=asked,
            note=size,
        )
    results.add(
        what="greedy sequences identical after wake",
        median=float(same),
        unit="of 32",
        asked="32",
        note="freed memory was filled with 0xFF",
    )
    results.add(
        what=f"greedy sequences identical after {args.cycles} cycles",
        median=float(after),
        unit="of 32",
        asked="32",
    )
    results.add(
        what=f"growth over {args.cycles} cycles",
        median=grown / 2**20,
        unit="MiB",
        asked="64",
        note="; ".join(engine.ledger.problems) or "the ledger saw no problem",
    )


def _same(left: Any, right: Any) -> int:
    """Sequences with equal tokens."""
    pairs = zip(left, right, strict=True)
    return sum(a[0].token_ids == b[0].token_ids for a, b in pairs)


def _hand_over(results: common.Results, engine: Any, model: Any, args: argparse.Namespace) -> None:
    """Fold and restore, or slots, as often as ``--repeats``."""
    from fxrl.engines import SamplingParams

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for route in ("fold", *(("slots",) if args.slots else ())):
        engine.attach(model, route=route)
        times: dict[str, list[float]] = {"sync": [], "fold": [], "restore": []}
        for _ in range(args.repeats):
            engine.update_lora(policy_version=engine.policy_version + 1)
            engine.generate([[5, 6, 7]], short)
            for name, values in times.items():
                values.append(engine.timings.get(name, 0.0))
        for name, values in times.items():
            if name == "sync" or route == "fold":
                results.add(
                    what=f"LoRA {route}: {name}",
                    median=1e3 * statistics.median(values),
                    max=1e3 * max(values[1:]),
                    unit="ms",
                    asked="20",
                    note="all-linear r=32, 196 layers; max is over all but the first",
                )


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--work", default="/tmp/fxrl-rl-step", help="folder for the model")
    parser.add_argument("--sequences", type=int, default=512, help="max_num_seqs; sizes the cache")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--graphs", help="vLLM's cudagraph_mode, e.g. FULL_DECODE_ONLY")
    parser.add_argument("--slots", action="store_true", help="build LoRA slots and time them too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
