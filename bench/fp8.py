"""One LoRA Linear, forward and backward: PEFT in bf16, fxrl with ``precision="fp8"``, and peers.

Rows x [M, K] that want a gradient go through a frozen bf16 weight [N, K] with a LoRA adapter of
PEFT's beside it; backward gives the gradients of x, A and B. Variants:

    peft           PEFT's module as it is
    peft-compile   the same by ``torch.compile``
    fxrl           ``fxrl.optimize`` of it, in bf16
    fxrl-fp8       ``fxrl.optimize`` of it, with ``precision="fp8"``
    torchao        torchao's float8 training (rowwise), the base layer converted, by torch.compile
    dequantised    the forward in FP8, the backward by the whole weight widened to bf16

``cosine`` compares the three gradients with those of fp32 arithmetic on the same weights.
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

#: Features in and out of Qwen3-8B's Linears.
SHAPES = {
    "q_proj, o_proj": (4096, 4096),
    "k_proj, v_proj": (4096, 1024),
    "gate_proj, up_proj": (4096, 12288),
    "down_proj": (12288, 4096),
}
VARIANTS = ("peft", "peft-compile", "fxrl", "fxrl-fp8", "torchao", "dequantised")
_HEADS = ("fuse-linear-logprob", "chunk-vocab-region")  # a layer's product is none
_AT_ONCE = 8
COLUMNS = ("layer", "K", "N", "M", "variant", "ms", "speedup", "cosine", "first_call_s", "error")
Step = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A Linear with an adapter, under a name that PEFT finds."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.proj: Any = nn.Linear(features, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [M, N]."""
        made: Tensor = self.proj(x)
        return made


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if fxrl failed in a row."""
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="rows")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--scale-down", type=int, default=1, help="divides the features")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variants", default=",".join(VARIANTS), type=common.words)
    args = parser.parse_args(argv)
    notes = [
        f"bf16, LoRA r={args.rank}, rows and weights drawn from a normal distribution; "
        "speedup is against peft; fxrl with on_miss=error",
    ]
    results = common.results(args, "A LoRA Linear in FP8", COLUMNS, notes)
    for name, sizes in SHAPES.items():
        _measure(args, results, name, *(size // args.scale_down for size in sizes))
    results.finish()
    return int(results.failed("fxrl"))


def _measure(
    args: argparse.Namespace, results: common.Results, name: str, features: int, out: int
) -> None:
    torch.manual_seed(0)
    model = _model(features, out, args.rank, args.device)
    x = torch.randn(args.tokens, features, device=args.device, dtype=torch.bfloat16)
    grad = torch.randn(args.tokens, out, device=args.device, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    truth = _gradients(exact, exact, x.float(), grad.float())
    baseline = None
    for variant in args.variants:
        with results.row(layer=name, K=features, N=out, M=args.tokens, variant=variant) as row:
            work = partial(_gradients, make_step(variant, model), model, x, grad)
            row["first_call_s"] = common.wall_s(work, args.device)
            row["cosine"] = min(map(_cosine, work(), truth))
            many = partial(_repeated, work)  # a launch from an idle GPU is not what is asked
            row["ms"] = common.median_ms(many, args.device, repeats=args.repeats) / _AT_ONCE
            baseline = row["ms"] if variant == "peft" else baseline
            row["speedup"] = baseline and baseline / row["ms"]
        torch.compiler.reset()


def _repeated(work: Callable[[], Any]) -> None:
    for _ in range(_AT_ONCE):
        work()


def _cosine(one: Tensor, other: Tensor) -> float:
    flat = one.float().flatten(), other.flatten()
    return float(nn.functional.cosine_similarity(*flat, dim=0))


def _model(features: int, out: int, rank: int, device: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.device(device):
        layer = Layer(features, out).bfloat16()
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["proj"])
        model: nn.Module = get_peft_model(layer, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero to begin with, which would hide A's gradient
            nn.init.normal_(parameter, std=0.02)
    return model


def make_step(variant: str, model: nn.Module) -> Step:
    """``x -> y`` of one variant."""
    if variant == "peft":
        return model
    if variant == "peft-compile":
        return torch.compile(lambda x: model(x))
    if variant in ("fxrl", "fxrl-fp8"):
        config = fxrl.Config(
            passes=tuple(name for name in REGISTRY if name not in _HEADS),
            on_miss="error",
            precision="fp8" if variant == "fxrl-fp8" else "bf16",
        )
        step = fxrl.optimize(model, lambda model, batch: model(batch["x"]), config)
        return lambda x: step({"x": x})
    proj: Any = model.base_model.model.proj  # type: ignore[union-attr]
    adapter = proj.lora_A["default"], proj.lora_B["default"]
    base: Step
    if variant == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        holder = nn.Sequential(nn.Linear(1, 1, bias=False))
        holder[0].weight = proj.base_layer.weight
        holder[0].in_features, holder[0].out_features = proj.base_layer.weight.shape[::-1]
        base = convert_to_float8_training(holder, config=config)
        return torch.compile(lambda x: base(x) + adapter[1](adapter[0](x)))
    weight = quantized_weight(proj.base_layer.weight.detach(), "row")
    return lambda x: _Dequantised.apply(x, *weight) + adapter[1](adapter[0](x))  # type: ignore[no-untyped-call]


def _gradients(step: Step, model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Of the rows, and of the adapter."""
    rows = x.detach().requires_grad_()
    step(rows).backward(grad)  # type: ignore[no-untyped-call]
    held: list[Any] = [rows, *(p for p in model.parameters() if p.requires_grad)]
    made = [tensor.grad for tensor in held]
    for tensor in held:
        tensor.grad = None
    return made


if __name__ == "__main__":
    sys.exit(main())
