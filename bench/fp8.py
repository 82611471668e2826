"""LoRA Linears, forward and backward: PEFT in bf16, fxrl with ``precision="fp8"``, and peers.

Rows x [M, K] that want a gradient go through frozen bf16 weights [N, K] with LoRA adapters of
PEFT's beside them, one or several that read the same rows; backward gives the gradients of x, A
and B. One step has ``--sets`` of them, each with rows of its own: a model's step is long, and
what it costs the host to begin one is not what is asked. Times are of one set. Variants:

    peft           PEFT's modules as they are
    peft-compile   the same by ``torch.compile``
    fxrl           ``fxrl.optimize`` of them, in bf16
    fxrl-fp8       ``fxrl.optimize`` of them, with ``precision="fp8"``
    torchao        torchao's float8 training (rowwise), the base layers converted, by torch.compile
    dequantised    the forward in FP8, the backward by the whole weight widened to bf16

``cosine`` is the least over all gradients of that with fp32 arithmetic on the same weights.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fxrl
from bench.lib import common
from fxrl.ops.fp8 import dequantized, quantized_weight
from fxrl.passes import REGISTRY

#: Features in, and out of each Linear that reads the same rows, in a layer of Qwen3-8B.
SHAPES = {
    "q_proj": (4096, (4096,)),
    "k_proj": (4096, (1024,)),
    "o_proj": (4096, (4096,)),
    "q/k/v_proj": (4096, (4096, 1024, 1024)),
    "up_proj": (4096, (12288,)),
    "gate/up_proj": (4096, (12288, 12288)),
    "down_proj": (12288, (4096,)),
}
VARIANTS = ("peft", "peft-compile", "fxrl", "fxrl-fp8", "torchao", "dequantised")
_HEADS = ("fuse-linear-logprob", "chunk-vocab-region")  # a layer's product is none
COLUMNS = ("layer", "K", "N", "M", "variant", "ms", "speedup", "cosine", "first_call_s", "error")
Rows = list[Tensor]
Step = Callable[[Rows], Rows]


class Layer(nn.Module):
    """Linears that read the same rows."""

    def __init__(self, features: int, outs: Sequence[int]) -> None:
        super().__init__()
        self.projs = nn.ModuleList(nn.Linear(features, out, bias=False) for out in outs)

    def forward(self, x: Tensor) -> Rows:
        """Of rows [M, K], what each gives: [M, N]."""
        return [proj(x) for proj in self.projs]


class Layers(nn.Module):
    """Layers, each with rows of its own."""

    def __init__(self, count: int, features: int, outs: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(features, outs) for _ in range(count))

    def forward(self, rows: Rows) -> Rows:
        """Of each layer's rows, what its Linears give, one after the other."""
        return [made for layer, x in zip(self.layers, rows, strict=True) for made in layer(x)]


class _Dequantised(torch.autograd.Function):
    """A product in FP8 whose backward widens the whole weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(values, scale)
        rows = torch.ops.fxrl.quantize_rows.default(x, 0)
        made: Tensor = torch.ops.fxrl.scaled_mm.default(*rows, values, scale, False, x.dtype)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad @ dequantized(*ctx.saved_tensors, grad.dtype), None, None


class _DequantisedLinear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)  # what PEFT looks for
        self.quantized = quantized_weight(weight.detach(), "row")

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Dequantised.apply(x, *self.quantized)  # type: ignore[no-untyped-call]
        return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if fxrl failed in a row."""
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="rows")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sets", type=int, default=6, help="of Linears in a step")
    parser.add_argument("--scale-down", type=int, default=1, help="divides the features")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", default=",".join(SHAPES), type=common.words)
    parser.add_argument("--variants", default=",".join(VARIANTS), type=common.words)
    args = parser.parse_args(argv)
    notes = [
        f"bf16, LoRA r={args.rank}, rows and weights drawn from a normal distribution; "
        f"{args.sets} sets in a step, ms of one; speedup is against peft; fxrl with on_miss=error",
    ]
    results = common.results(args, "LoRA Linears in FP8", COLUMNS, notes)
    for name in args.layers:
        features, outs = SHAPES[name]
        _measure(
            args,
            results,
            name,
            features // args.scale_down,
            [out // args.scale_down for out in outs],
        )
    results.finish()
    return int(results.failed("fxrl"))


def _measure(
    args: argparse.Namespace, results: common.Results, name: str, features: int, outs: list[int]
) -> None:
    torch.manual_seed(0)
    model = _model(args.sets, features, outs, args.rank, args.device)

    def drawn(width: int) -> Tensor:
        return torch.randn(args.tokens, width, device=args.device, dtype=torch.bfloat16)

    rows = [drawn(features) for _ in range(args.sets)]
    grads = [drawn(out) for _ in range(args.sets) for out in outs]
    truth = _exact(model, rows, grads)
    sizes = {"K": features, "N": "+".join(map(str, outs)), "M": args.tokens}
    baseline = None
    for variant in args.variants:
        with results.row(layer=name, variant=variant, **sizes) as row:
            step, trained = make_step(variant, model)
            work = partial(_gradients, step, trained, rows, grads)
            row["first_call_s"] = common.wall_s(work, args.device)
            row["cosine"] = min(map(_cosine, work(), truth))
            row["ms"] = common.median_ms(work, args.device, repeats=args.repeats) / args.sets
            baseline = row["ms"] if variant == "peft" else baseline
            row["speedup"] = baseline and baseline / row["ms"]
        torch.compiler.reset()


def _cosine(one: Tensor, other: Tensor) -> float:
    flat = one.float().flatten(), other.float().flatten()
    return float(nn.functional.cosine_similarity(*flat, dim=0))


def _model(sets: int, features: int, outs: list[int], rank: int, device: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.device(device):
        layer = Layers(sets, features, outs).bfloat16()
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=r"layers\.\d+\.projs\.\d+")
        model: nn.Module = get_peft_model(layer, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero to begin with, which would hide A's gradient
            nn.init.normal_(parameter, std=0.02)
    return model


def make_step(variant: str, model: nn.Module) -> tuple[Step, nn.Module]:
    """What one variant computes, and the module whose parameters it trains."""
    if variant == "peft":
        return model, model
    if variant == "peft-compile":
        return torch.compile(lambda rows: model(rows)), model
    if variant in ("fxrl", "fxrl-fp8"):
        config = fxrl.Config(
            passes=tuple(name for name in REGISTRY if name not in _HEADS),
            on_miss="error",
            precision="fp8" if variant == "fxrl-fp8" else "bf16",
        )
        step = fxrl.optimize(model, lambda model, batch: model(batch["rows"]), config)
        return lambda rows: step({"rows": rows}), model
    model = copy.deepcopy(model)
    if variant == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name("rowwise"),
            module_filter_fn=lambda _, name: name.endswith("base_layer"),
        )
        return torch.compile(lambda rows: model(rows)), model
    for module in [*model.modules()]:
        if isinstance(base := getattr(module, "base_layer", None), nn.Linear):
            module.base_layer = _DequantisedLinear(base.weight)
    return model, model


def _exact(model: nn.Module, rows: Rows, grads: Rows) -> Rows:
    """The gradients by fp32 arithmetic, in bf16: a set's rows and results would else be large."""
    exact = copy.deepcopy(model).float()
    made = _gradients(exact, exact, [x.float() for x in rows], [g.float() for g in grads])
    return [grad.bfloat16() for grad in made]


def _gradients(step: Step, model: nn.Module, rows: Rows, grads: Rows) -> Rows:
    """Of the rows, and of the adapters."""
    read = [x.detach().requires_grad_() for x in rows]
    torch.autograd.backward(step(read), grads)
    held: list[Any] = [*read, *(p for p in model.parameters() if p.requires_grad)]
    made = [tensor.grad for tensor in held]
    for tensor in held:
        tensor.grad = None
    return made


if __name__ == "__main__":
    sys.exit(main())
