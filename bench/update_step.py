"""One update, GRPO with LoRA by default: peak memory, time, and how far gradients are from fp32.

Variants: ``eager``, ``fxrl`` (``fxrl.optimize`` over the same model), ``fxrl-fp8`` (frozen Linears
in FP8), ``fxrl-fp8-wide`` (likewise, and the gradient of rows with the weight widened),
``fxrl-layers-eager`` (with the layers run op by op) and ``compile`` (``torch.compile`` of the loss
function). Hugging Face's gradient checkpointing is on (fxrl takes it over) unless
``--no-checkpointing``. Each gets the same weights, batch and a fresh optimizer. An update is
forward, backward and optimizer step; its peak is over everything that lives on the device.

Then the gradient of every LoRA parameter in bf16, eager and fxrl, is compared with an fp32
reference that has the same weights: ``norm(g - g32) / norm(g32)``. Two correct bf16
implementations differ by many percent on a random model, so neither is the other's yardstick.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import fxrl
from bench.lib import common, qwen
from fxrl.ir.plan import CutLayer, in_segment
from fxrl.models import offload_embeddings
from fxrl.ops import host_memory
from fxrl.passes import REGISTRY

COLUMNS = (
    "variant",
    "layers",
    "tokens",
    "first_call_s",
    "update_ms",
    "update_ms_min",
    "update_ms_max",
    "peak_gib",
    "peak_over_base_gib",
    "host_gib",
    "loss",
    "grad_error_all",
    "grad_error_mean",
    "grad_error_max",
    "loss_error",
    "error",
)
PLAN = "KEPT,INPUTS_ON,KEPT_ON,TILE[,GROUPS]"
_TOP_KERNELS = 40
LossFn = Callable[[nn.Module, Any], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see ``run``."""
    return run(build_parser(__doc__).parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """All rows of ``args``.

    Returns:
        1 if fxrl failed in one of them, else 0.
    """
    trained = f"LoRA r={args.rank}, all linear layers" if args.rank else "all weights trained"
    notes = [
        f"attention: {args.attention}, attention_mask: {args.mask}; fxrl with min_saved_bytes=0, "
        f"on_miss=error; checkpointing {'off' if args.no_checkpointing else 'on'}; "
        f"{args.micro_batches} micro-batches an update; layers' plan: {args.plan or 'default'}; "
        f"gpu_memory: {args.gpu_memory or 'free'}, host_memory: {args.host_memory or 'free'}"
        + ("; embeddings in host memory" if args.offload_embeddings else "")
        + ("; frozen Linears in bitsandbytes' NF4" if args.bitsandbytes else ""),
        f"{args.loss}; {args.shape} shape, {trained}, bf16, random weights; rows of {args.prompt} "
        f"prompt and {args.completion} completion tokens; card: {args.card or 'all'} GiB",
        "grad_error columns: relative L2 distance to the fp32 gradient of the same weights; over "
        "all LoRA parameters at once, and mean and max over single parameters; rows 'gradients': "
        "one draw of weights and batch each",
    ]
    common.limit_memory(args.card)
    results = common.results(args, "GRPO update: eager, fxrl, fp32 reference", COLUMNS, notes)
    with qwen.attention(args.attention):
        if args.repeats:
            measure_updates(args, results)
        for seed in range(args.ref_seeds):
            common.free_memory(args.device)
            measure_gradients(args, results, seed)
    results.finish()
    return int(results.failed("fxrl"))


def make_loss(name: str = "grpo") -> LossFn:
    """GRPO as the library's users get it (clipped ratio, no KL term), or DPO with two forwards."""
    from fxrl import losses

    return losses.grpo(beta=0.0) if name == "grpo" else dpo_in_two_forwards


def dpo_in_two_forwards(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """DPO (arXiv:2305.18290, eq. 7) as one writes it: the better half of the rows (at random the
    first one) goes through the model, then the other; the reference is ``old_logps``."""
    gains = []
    for half in (0, 1):
        ids, mask, reference = (
            batch[name].chunk(2)[half] for name in ("input_ids", "completion_mask", "old_logps")
        )
        count = mask.shape[1]
        logits = model(input_ids=ids).logits[:, -count - 1 : -1]
        logps = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, -count:, None])[..., 0]
        gains.append(((logps - reference) * mask).sum(-1))
    return -nn.functional.logsigmoid(0.1 * (gains[0] - gains[1])).mean()


def make_plan(text: str, model: nn.Module) -> fxrl.Plan | None:
    """``attention,gpu,host,4096`` for every layer: what its cut keeps, where its input waits, where
    the rest, and rows per tile of its MLP; ``,8,4`` may follow, groups of heads of its attention,
    and how many layers make a segment."""
    if not text:
        return None
    kept, inputs_on, kept_on, *numbers = text.split(",")
    tile, groups, segment = (*map(int, numbers), 0, 0)[:3]
    where: Any = {"kept": kept, "inputs_on": inputs_on, "kept_on": kept_on}
    way = CutLayer(**where, tile_tokens=tile, head_groups=groups)
    names = [name for name, _ in model.named_modules() if re.search(r"\.layers\.\d+$", name)]
    choices = {}
    for place, name in enumerate(names):
        first = place % max(segment, 1) == 0
        last = place + 1 == len(names) or (place + 1) % max(segment, 1) == 0
        choices[f"0:{name}"] = in_segment(way, first=first, last=last) if segment else way
    return fxrl.Plan.from_json(fxrl.Plan(choices).to_json())


def make_step(
    variant: str,
    model: nn.Module,
    loss_fn: LossFn,
    plan: str = "",
    budgets: Mapping[str, Any] | None = None,
) -> Callable[[Any], Any]:
    """``batch -> what loss_fn returns`` for one variant.

    Args:
        budgets: ``gpu_memory`` and ``host_memory`` of fxrl's configuration; None: what is free.
    """
    if variant == "eager":
        return lambda batch: loss_fn(model, batch)
    if variant == "compile":
        compiled = torch.compile(loss_fn)
        return lambda batch: compiled(model, batch)
    layers = {"outline-layers", "recompute", "tile-tokens", "group-heads", "offload"}
    eager_layers = variant == "fxrl-layers-eager"
    config = fxrl.Config(
        min_saved_bytes=0,
        passes=tuple(n for n in REGISTRY if n not in layers) if eager_layers else None,
        on_miss="error",
        precision="fp8" if variant.startswith("fxrl-fp8") else "bf16",
        pass_options={"fp8-lora": {"gradient": "bf16"}} if variant == "fxrl-fp8-wide" else None,
        **(budgets or {}),
    )
    return fxrl.optimize(model, loss_fn, config, plan=make_plan(plan, model))


def measure_updates(args: argparse.Namespace, results: common.Results) -> None:
    """One row a variant: time and peak of the whole update."""
    model = qwen.make_model(
        args.shape,
        args.device,
        layers=args.layers,
        rank=args.rank,
        checkpointing=not args.no_checkpointing,
        input_hook=not args.no_input_hook,
        bitsandbytes=args.bitsandbytes,
    )
    if args.offload_embeddings:
        offload_embeddings(model)
    batch = qwen.make_batch(
        model,
        device=args.device,
        tokens=args.tokens,
        completion=args.completion,
        prompt=args.prompt,
        mask=args.mask,
    )
    start = {name: p.detach().clone() for name, p in qwen.trainable(model).items()}
    layers = qwen.base_model(model).config.num_hidden_layers
    for variant in args.variants:
        with results.row(variant=variant, layers=layers, tokens=args.tokens) as row:
            row |= _one_variant(args, variant, model, batch, results)
        with torch.no_grad():
            for name, parameter in qwen.trainable(model).items():
                parameter.copy_(start[name])
                parameter.grad = None
        torch.compiler.reset()
        common.free_memory(args.device)
    _note_saving(args, qwen.base_model(model).config.vocab_size, results)


def _note_saving(args: argparse.Namespace, vocab_size: int, results: common.Results) -> None:
    at = COLUMNS.index("peak_gib")
    peaks = {row[0]: row[at] for row in results.rows if row[at] is not None}
    logits = args.tokens * vocab_size * 4 / common.GiB
    if {"eager", "fxrl"} <= peaks.keys():
        saved = peaks["eager"] - peaks["fxrl"]
        results.notes.append(
            f"peak: fxrl is {saved:.2f} GiB below eager; one set of fp32 logits is {logits:.2f} GiB"
        )


def _one_variant(
    args: argparse.Namespace,
    variant: str,
    model: nn.Module,
    batch: dict[str, Any],
    results: common.Results,
) -> dict[str, Any]:
    budgets = {"gpu_memory": args.gpu_memory, "host_memory": args.host_memory}
    step = make_step(variant, model, make_loss(args.loss), args.plan, budgets)
    optimizer = torch.optim.AdamW(list(qwen.trainable(model).values()), lr=1e-6, fused=True)
    losses: list[torch.Tensor] = []

    def update() -> None:
        for _ in range(args.micro_batches):
            losses.append(qwen.backward_fn(step, batch)())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    first = common.wall_s(update, args.device)
    peak, over_base = common.peak_bytes(update, args.device)  # which warms up
    low, middle, high = common.spread_ms(update, args.device, warmup=0, repeats=args.repeats)
    if args.profile:
        _print_kernels(update)
    if isinstance(step, fxrl.TrainStep):
        results.say(f"{variant}\n{step.report}")
        results.extra["report"] = [str(remark) for remark in step.report.remarks]
    return {
        "first_call_s": first,
        "update_ms": middle,
        "update_ms_min": low,
        "update_ms_max": high,
        "peak_gib": common.gib(peak),
        "peak_over_base_gib": common.gib(over_base),
        "host_gib": common.gib(host_memory.bytes_held()) if variant.startswith("fxrl") else 0.0,
        "loss": losses[0].item(),
    }


def _print_kernels(update: Callable[[], None]) -> None:
    """The kernels that take the most time, and how busy the device is."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        update()
        torch.cuda.synchronize()
    kernels = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"KERNELS {total / 1e3:.1f} ms in all", flush=True)
    for event in kernels[:_TOP_KERNELS]:
        time_ms = event.self_device_time_total / 1e3
        print(f"KERNEL {time_ms:8.2f} ms {event.count:5d} x {event.key[:110]}", flush=True)


def measure_gradients(args: argparse.Namespace, results: common.Results, seed: int) -> None:
    """One row a variant: distance of its bf16 gradients to the fp32 ones."""
    model = qwen.make_model(
        args.shape,
        args.device,
        layers=args.ref_layers,
        rank=args.rank,
        input_hook=not args.no_input_hook,
        bitsandbytes=args.bitsandbytes,
        seed=seed,
    )
    batch = qwen.make_batch(
        model,
        device=args.device,
        tokens=args.ref_tokens,
        completion=min(args.completion, args.ref_tokens),
        prompt=args.prompt,
        mask=args.mask,
        seed=seed,
    )
    found: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
    failed: dict[str, str] = {}
    for variant in args.variants:
        try:
            step = make_step(variant, model, make_loss(args.loss), args.plan)
            found[variant] = _gradients(step, model, batch)
        except Exception as error:  # recorded in its row
            failed[variant] = common.error_text(error)
        torch.compiler.reset()
        common.free_memory(args.device)
    torch.set_float32_matmul_precision("highest")
    qwen.widen(model)
    with qwen.attention("math"):  # the fused kernels take no fp32
        loss_fn = make_loss(args.loss)
        true_loss, truth = _gradients(lambda given: loss_fn(model, given), model, batch)
    layers = qwen.base_model(model).config.num_hidden_layers
    for variant in args.variants:
        row: dict[str, Any] = {
            "variant": f"{variant}, gradients, seed {seed}",
            "layers": layers,
            "tokens": args.ref_tokens,
            "error": failed.get(variant),
        }
        if variant in found:
            loss, gradients = found[variant]
            row |= _errors(gradients, truth)
            row |= {"loss": loss, "loss_error": abs(loss - true_loss)}
        results.add(**row)


def _gradients(
    step: Callable[[Any], Any], model: nn.Module, batch: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    loss = qwen.backward_fn(step, batch)()
    gradients = {}
    for name, parameter in qwen.trainable(model).items():
        if parameter.grad is None:
            raise RuntimeError(f"{name} got no gradient")
        gradients[name] = parameter.grad.float()
        parameter.grad = None
    return loss.item(), gradients


def _errors(gradients: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    off = [(gradients[name] - true).norm().double() for name, true in truth.items()]
    size = [true.norm().double() for true in truth.values()]
    single = torch.stack(off) / torch.stack(size)
    return {
        "grad_error_all": (torch.stack(off).norm() / torch.stack(size).norm()).item(),
        "grad_error_mean": single.mean().item(),
        "grad_error_max": single.max().item(),
    }


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """The command line, with the sizes of a large GPU as defaults."""
    parser = common.parser(about)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--layers", type=int, help="by default the shape's own number")
    parser.add_argument("--loss", default="grpo", choices=("grpo", "dpo"))
    parser.add_argument("--rank", type=int, default=32, help="0 trains all weights")
    parser.add_argument("--tokens", type=int, default=16384, help="completion tokens in all")
    parser.add_argument("--completion", type=int, default=2048, help="completion tokens a row")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens a row")
    parser.add_argument("--mask", default="none", choices=qwen.MASKS)
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "flash", "math", "any"))
    parser.add_argument("--no-input-hook", action="store_true", help="see bench/lib/qwen.py")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards in an update")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update")
    parser.add_argument("--plan", default="", metavar=PLAN, help="for all")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="for fxrl; what is free by default")
    parser.add_argument(
        "--card", type=float, metavar="GIB", help="what PyTorch may allocate, eager too"
    )
    parser.add_argument("--host-memory", metavar="SIZE")
    parser.add_argument("--offload-embeddings", action="store_true", help="frozen ones, for all")
    parser.add_argument("--bitsandbytes", action="store_true", help="QLoRA, for all")
    parser.add_argument("--repeats", type=int, default=7, help="0 leaves the timing out")
    parser.add_argument("--variants", default="eager,fxrl", type=common.words)
    parser.add_argument("--ref-layers", type=int, default=12)
    parser.add_argument("--ref-tokens", type=int, default=4096)
    parser.add_argument("--ref-seeds", type=int, default=3, help="0 leaves the gradients out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
