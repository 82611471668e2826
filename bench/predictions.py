"""What plans predict beside what happens: peak memory of GPU and host, seconds of a step.

Each row is one model, one batch and one budget: the step is planned at its first call, as for
everybody, then GRPO updates run and are measured. Predicted seconds are without the optimizer's,
so the measured ones are, too; predicted memory has AdamW's states in it, so they are there from
the start. For the longest contexts, ``--repeats 1`` reads peak and seconds off one call, the
second, and ``--repeats 0`` off the first, with what it compiles.

A case is ``shape:rank:layers:rows:tokens:gpu_memory:host_memory``; rank 0 trains in full, ``-`` is
what is free. ``:packed`` (eight documents in a row), ``:padded`` (half of the first rows' tokens),
``:weights=nf4`` (or ``int4``, ``fp8``, or ``bitsandbytes``' NF4; of what is frozen),
``:host-embeddings`` (their tables in host memory), ``:micro-batches=N`` and
``:plan=attention/gpu/host/4096/8`` (of every layer, as ``--plan`` of ``bench.update_step`` with
strokes for commas) may follow.

    fxrl bench predictions
    fxrl bench predictions --cases qwen3-8b:32:12:1:8192:9.5GiB:30GiB
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import fxrl
from bench.lib import common, qwen
from bench.update_step import make_plan
from fxrl import losses
from fxrl.ir.plan import CutHead, CutLayer
from fxrl.models import offload_embeddings, quantize
from fxrl.ops import host_memory

COLUMNS = (
    "shape",
    "trained",
    "layers",
    "rows x tokens",
    "layout",
    "micro-batches",
    "gpu_memory",
    "host_memory",
    "predicted_gib",
    "peak_gib",
    "off",
    "reserved_gib",
    "predicted_host_gib",
    "host_gib",
    "predicted_ms",
    "step_ms",
    "off_ms",
    "first_call_s",
    "plan",
    "error",
)
CASES = (
    "qwen3-8b:32:12:1:8192:-:-",
    "qwen3-8b:32:12:1:8192:16GiB:0",
    "qwen3-8b:32:12:1:8192:12GiB:0",
    "qwen3-8b:32:12:1:8192:9.5GiB:0",
    "qwen3-8b:32:12:1:8192:9.5GiB:30GiB",
    "qwen3-8b:32:12:4:2048:11GiB:0",
    "qwen3-8b:32:12:1:16384:12GiB:30GiB",
    "qwen3-8b:32:6:1:32768:12GiB:60GiB",
    "llama-3.1-8b:32:8:1:8192:-:-",
    "llama-3.1-8b:32:8:2:8192:10GiB:0",
    "qwen2.5-3b:32:12:1:16384:-:-",
    "qwen2.5-3b:32:12:1:16384:8GiB:30GiB",
    "qwen3-1.7b:0:8:1:8192:-:-",
    "qwen3-1.7b:0:8:1:8192:8GiB:0",
    "qwen3-1.7b:0:8:1:8192:8GiB:0:micro-batches=2",
    "qwen3-8b:32:12:1:8192:12GiB:0:micro-batches=2",
    "qwen3-8b:32:6:1:16384:-:-:packed",
    "qwen3-8b:32:6:4:8192:-:-:padded",
    "qwen3-30b-a3b:32:4:1:8192:-:-",
    "qwen3-30b-a3b:32:4:1:8192:16GiB:0",
)
_MICRO_BATCHES, _PLAN, _WEIGHTS = "micro-batches=", "plan=", "weights="
_HOST_EMBEDDINGS = "host-embeddings"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if a case failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--cases", default=CASES, type=common.words, metavar="A,B")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps, see above")
    parser.add_argument("--card", type=float, help="GiB of a smaller card; default: all")
    args = parser.parse_args(argv)
    common.limit_memory(args.card)
    notes = [
        "GRPO with clipped ratios, bf16, random weights; ids of T tokens, masks and old log-probs "
        "of T-1; on_miss=error; the plan is fxrl's own",
        "peak and reserved: PyTorch's allocator over one update, weights and AdamW's states "
        "included; fxrl counts 3 % of gpu_memory as fragments; PYTORCH_CUDA_ALLOC_CONF="
        f"{os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')!r}",
    ]
    results = common.results(args, "Plans: predicted and measured", COLUMNS, notes)
    for case in args.cases:
        _measure(case, args, results)
        torch.compiler.reset()
        common.free_memory(args.device)
        host_memory.drop_free_pages()
    results.finish()
    return int(results.failed())


def _measure(case: str, args: argparse.Namespace, results: common.Results) -> None:
    shape, *numbers, gpu, host = case.split(":")[:7]
    rank, layers, rows, tokens = map(int, numbers)
    words = case.split(":")[7:]
    micro = [word.removeprefix(_MICRO_BATCHES) for word in words if _MICRO_BATCHES in word]
    plans = [word.removeprefix(_PLAN).replace("/", ",") for word in words if _PLAN in word]
    weights = [word.removeprefix(_WEIGHTS) for word in words if _WEIGHTS in word]
    layout = next((word for word in words if word in qwen.MASKS), "none")
    asked: dict[str, Any] = {
        "shape": shape,
        "trained": (f"LoRA r={rank}" if rank else "all")
        + "".join(f" on {w}" for w in weights)
        + (", embeddings on the host" if _HOST_EMBEDDINGS in words else ""),
        "layers": layers,
        "rows x tokens": f"{rows} x {tokens}",
        "layout": layout,
        "micro-batches": int(micro[0]) if micro else 1,
        "gpu_memory": gpu,
        "host_memory": host,
    }
    budgets = {"gpu_memory": gpu, "host_memory": host}
    config = fxrl.Config(
        min_saved_bytes=0,
        on_miss="error",
        **{
            name: int(size) if size == "0" else size
            for name, size in budgets.items()
            if size != "-"
        },
    )
    with results.row(**asked) as row:
        theirs = "bitsandbytes" in weights
        given = {"layers": layers, "rank": rank, "bitsandbytes": theirs}
        model = qwen.make_model(shape, args.device, checkpointing=False, **given)
        for kind in weights if not theirs else ():
            quantize(model, kind)
        if _HOST_EMBEDDINGS in words:
            offload_embeddings(model)
        batch = qwen.drawn_batch(model, rows, tokens, torch.Generator(args.device).manual_seed(0))
        batch |= qwen.layout(batch["input_ids"], layout, tokens // 2)
        plan = make_plan(plans[0] if plans else "", model)
        row |= _measured(model, config, plan, batch, asked["micro-batches"], args)


def _measured(
    model: torch.nn.Module,
    config: fxrl.Config,
    given: fxrl.Plan | None,
    batch: dict[str, torch.Tensor],
    micro_batches: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    step = fxrl.optimize(model, losses.grpo(beta=0.0), config, plan=given)
    optimizer = _adamw(model)
    backward = qwen.backward_fn(step, batch)
    seconds = []

    def update() -> None:
        for _ in range(micro_batches):
            backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def only_step() -> None:
        backward()
        optimizer.zero_grad(set_to_none=True)

    def timed_update() -> None:
        seconds.append(common.wall_s(update, args.device))

    for _ in range(min(args.repeats, 1) + 1):
        peak, _ = common.peak_bytes(timed_update, args.device)
    reserved = torch.cuda.max_memory_reserved() if args.device == "cuda" else None
    took = seconds[-1] * 1e3
    if args.repeats > 1:
        took = common.median_ms(only_step, args.device, warmup=1, repeats=args.repeats)
    plan = step.plan
    cuts = (choice for choice in plan.choices.values() if isinstance(choice, CutLayer))
    told = Counter(
        f"{c.kept},{c.inputs_on},{c.kept_on},{c.tile_tokens}"
        + (f",{c.head_groups}" if c.head_groups else "")
        for c in cuts
    )
    heads = Counter(c.kept for c in plan.choices.values() if isinstance(c, CutHead))
    told |= Counter({f"head: {kept}": count for kept, count in heads.items()})
    wanted, predicted = plan.peak_gpu_bytes, plan.step_seconds
    return {
        "predicted_gib": common.gib(wanted),
        "peak_gib": common.gib(peak),
        "off": f"{wanted / peak - 1:+.2%}" if wanted and peak else None,
        "reserved_gib": common.gib(reserved),
        "predicted_host_gib": common.gib(plan.peak_host_bytes),
        "host_gib": common.gib(host_memory.bytes_held()),
        "predicted_ms": predicted and predicted * 1e3,
        "step_ms": took,
        "off_ms": predicted and f"{predicted * 1e3 / took - 1:+.1%}",
        "first_call_s": seconds[0],
        "plan": "; ".join(f"{count} x {cut}" for cut, count in told.items()),
    }


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """With its states, which it makes in its first step."""
    parameters = list(qwen.trainable(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


if __name__ == "__main__":
    sys.exit(main())
