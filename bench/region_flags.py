"""Inductor options for region bodies: what each costs at compile time and gives at run time.

Every option set compiles the forward and the vjp of each body from an empty cache, the way
``fxrl.optimize`` does, and is then timed; ``speedup`` is against ``default`` (Inductor's own
settings) of the same body. An option is worth keeping only if it
buys step time that its compile time does not eat.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

from bench.lib import bodies, common, qwen
from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.variants import build_region

COLUMNS = (
    "body",
    "tokens",
    "flags",
    "compile_s",
    "forward_ms",
    "vjp_ms",
    "speedup",
    "tflops",
    "peak_over_base_gib",
    "difference",
    "error",
)
# None stands for fxrl's own set.
FLAGS: dict[str, dict[str, Any] | None] = {
    "default": {},
    "fxrl": None,
    "coordinate_descent_tuning": {"coordinate_descent_tuning": True},
    "max_autotune_pointwise": {"max_autotune_pointwise": True},
    "max_autotune_gemm": {"max_autotune_gemm": True},
    "max_autotune_gemm, TMA": {
        "max_autotune_gemm": True,
        "triton.enable_persistent_tma_matmul": True,
    },
    "max_autotune_gemm, no epilogue fusion": {"max_autotune_gemm": True, "epilogue_fusion": False},
    "max_autotune": {"max_autotune": True},
    "no shape_padding": {"shape_padding": False},
    "no comprehensive_padding": {"comprehensive_padding": False},
    "aggressive_fusion": {"aggressive_fusion": True},
    "benchmark_fusion": {"benchmark_fusion": True},
    "combo_kernels": {"combo_kernels": True},
    "multi_kernel": {"triton.multi_kernel": 1},
    "cooperative_reductions": {"triton.cooperative_reductions": True},
    "no persistent_reductions": {"triton.persistent_reductions": False},
    "no split_reductions": {"split_reductions": False},
    "no online_softmax": {"online_softmax": False},
    "use_fast_math": {"use_fast_math": True},
    "no size_asserts": {"size_asserts": False},
    "cudagraphs": {"triton.cudagraphs": True},
}


def main() -> None:
    args = _arguments()
    notes = [
        f"{args.shape} widths, bf16; attention: {args.attention}; compile_s: forward and vjp, "
        "empty caches, compile workers already running; times are medians",
        "difference: largest relative L2 distance of an output or gradient to the default flags'",
    ]
    results = common.Results(
        "Inductor options for region bodies", COLUMNS, args.out, notes, as_json=args.json
    )
    deadline = time.monotonic() + args.time_limit
    with qwen.attention(args.attention), torch.no_grad():
        _warm_up_compiler(args.device)
        for name, tokens in zip(args.bodies, args.tokens, strict=True):
            _sweep(args, results, bodies.make_body(name, args.shape, tokens, args.device), deadline)
            common.free_memory(args.device)
    results.finish()


def _sweep(
    args: argparse.Namespace, results: common.Results, body: bodies.Body, deadline: float
) -> None:
    base: tuple[float, list[Tensor]] | None = None
    for flags in args.flags:
        if FLAGS[flags] is None and not InductorOptions.of(None).options:
            continue  # fxrl changes nothing: the row would be a second "default"
        row: dict[str, Any] = {"body": body.name, "tokens": body.inputs[0].shape[-2]}
        row |= {"flags": flags}
        if time.monotonic() > deadline:
            row["error"] = f"not run: --time-limit {args.time_limit} s was over"
            results.add(**row)
            continue
        try:
            measured, outputs = _measure(args, body, FLAGS[flags])
            row |= measured
            total = measured["forward_ms"] + measured["vjp_ms"]
            if flags == "default":
                base = (total, outputs)
            if base is not None:
                row |= {"speedup": base[0] / total, "difference": _difference(outputs, base[1])}
        except Exception as error:  # an option that fails is a result
            row["error"] = common.error_text(error)
        results.add(**row)
        torch.compiler.reset()
        common.free_memory(args.device)


def _measure(
    args: argparse.Namespace, body: bodies.Body, flags: dict[str, Any] | None
) -> tuple[dict[str, Any], list[Tensor]]:
    inductor = InductorOptions.of(None) if flags is None else InductorOptions(tuple(flags.items()))
    torch.manual_seed(1)  # the same incoming gradients for every option set
    grads = tuple(torch.randn_like(out) for out in body.forward(*body.inputs))
    region = body.region()
    with fresh_cache():
        start = time.perf_counter()
        kernels = build_region(region, inductor)
        run_forward = lambda: kernels.forward(*body.inputs)  # noqa: E731
        run_vjp = lambda: kernels.vjp(*body.inputs, *grads)  # noqa: E731
        outputs = [out.clone() for out in (*run_forward(), *run_vjp())]
        common.synchronize(args.device)
        compile_s = time.perf_counter() - start
    forward_ms = common.median_ms(run_forward, args.device, repeats=args.repeats)
    vjp_ms = common.median_ms(run_vjp, args.device, repeats=args.repeats)
    _, over_base = common.peak_bytes(run_vjp, args.device)
    row = {
        "compile_s": compile_s,
        "forward_ms": forward_ms,
        "vjp_ms": vjp_ms,
        "tflops": body.flops / (forward_ms + vjp_ms) / 1e9,
        "peak_over_base_gib": common.gib(over_base),
    }
    return row, outputs


def _difference(outputs: list[Tensor], base: list[Tensor]) -> float:
    pairs = zip(outputs, base, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def _warm_up_compiler(device: str) -> None:
    """Starts Inductor's compile workers, so that the first row does not pay for them."""
    with fresh_cache():
        torch.compile(lambda x: (x.sin() * 2).sum(-1))(torch.randn(128, 128, device=device))
    torch.compiler.reset()


def _arguments() -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--bodies", default=["head", "mlp", "layer"], type=words)
    parser.add_argument(
        "--tokens",
        default=[4096, 8192, 8192],
        type=lambda text: [int(number) for number in text.split(",")],
        help="tokens of each body",
    )
    parser.add_argument("--flags", default=list(FLAGS), type=lambda text: text.split(";"))
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "flash", "math", "any"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=540, help="seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
