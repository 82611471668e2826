"""Inductor options for region bodies: what each costs at compile time and gives at run time.

Every option set compiles the forward and the vjp of each body from an empty cache, the way
``fxrl.optimize`` does, and is then timed; ``speedup`` is against ``default`` (Inductor's own
settings) of the same body. An option is worth keeping only if it
buys step time that its compile time does not eat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bench.lib import common, qwen
from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.variants import build_region
from fxrl.ir.region import InputSpec, Region

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
    results = common.results(args, "Inductor options for region bodies", COLUMNS, notes)
    deadline = time.monotonic() + args.time_limit
    with qwen.attention(args.attention), torch.no_grad():
        _warm_up_compiler(args.device)
        for name, tokens in zip(args.bodies, args.tokens, strict=True):
            _sweep(args, results, make_body(name, args.shape, tokens, args.device), deadline)
            common.free_memory(args.device)
    results.finish()


def _sweep(args: argparse.Namespace, results: common.Results, body: Body, deadline: float) -> None:
    base: tuple[float, list[Tensor]] | None = None
    for flags in args.flags:
        if FLAGS[flags] is None and not InductorOptions.of(None).options:
            continue  # fxrl changes nothing: the row would be a second "default"
        tokens = body.inputs[0].shape[-2]
        with results.row(body=body.name, tokens=tokens, flags=flags) as row:
            if time.monotonic() > deadline:
                row["error"] = f"not run: --time-limit {args.time_limit} s was over"
                continue
            measured, outputs = _measure(args, body, FLAGS[flags])
            row |= measured
            total = measured["forward_ms"] + measured["vjp_ms"]
            if flags == "default":
                base = (total, outputs)
            if base is not None:
                row |= {"speedup": base[0] / total, "difference": _difference(outputs, base[1])}
        torch.compiler.reset()
        common.free_memory(args.device)


def _measure(
    args: argparse.Namespace, body: Body, flags: dict[str, Any] | None
) -> tuple[dict[str, Any], list[Tensor]]:
    inductor = InductorOptions.of(None) if flags is None else InductorOptions(tuple(flags.items()))
    torch.manual_seed(1)  # the same incoming gradients for every option set
    grads = tuple(torch.randn_like(out) for out in body.forward(*body.inputs))
    region = body.region()
    with fresh_cache():
        start = time.perf_counter()
        kernels = build_region(region, inductor)
        halves = kernels.body(kernels.bound.read(body.inputs))
        run_forward = lambda: halves.forward(*body.inputs)  # noqa: E731
        made = {"input": body.inputs, "output": run_forward()}
        kept = [made[kind][i] for kind, i in halves.backward.read]
        run_vjp = lambda: halves.backward(kept, grads)  # noqa: E731
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
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--bodies", default=["head", "mlp", "layer"], type=common.words)
    parser.add_argument(
        "--tokens", default=[4096, 8192, 8192], type=common.numbers, help="tokens of each body"
    )
    parser.add_argument("--flags", default=list(FLAGS), type=lambda text: text.split(";"))
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "flash", "math", "any"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=540, help="seconds")
    return parser.parse_args()


# -- the bodies: a tile of the loss head, an MLP, a decoder layer


@dataclass(frozen=True)
class Body:
    """A region's function with inputs to run it on.

    Attributes:
        forward: inputs to outputs.
        inputs: example tensors on the device.
        tiled: indices of the inputs whose dim 0 is tokens.
        differentiated: indices of the inputs that get a gradient.
        flops: of forward and vjp (with its recompute) together, matrix products only.
    """

    name: str
    forward: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    tiled: tuple[int, ...]
    differentiated: tuple[int, ...]
    flops: float

    def region(self) -> Region:
        """The body as a pass would outline it."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fakes = [mode.from_tensor(tensor) for tensor in self.inputs]
            # Pre-dispatch keeps attention one call: which kernel it becomes is decided later.
            graph = make_fx(self.forward, pre_dispatch=True)(*fakes)
        return Region(
            graph,
            tuple(
                InputSpec(fake, index in self.tiled, index in self.differentiated)
                for index, fake in enumerate(fakes)
            ),
        )


def make_body(name: str, shape: str, tokens: int, device: str) -> Body:
    """``head``, ``mlp`` or ``layer`` at the widths of ``qwen.SHAPES[shape]``."""
    if name == "head":
        return _head(shape, tokens, device)
    model = qwen.make_model(shape, device, layers=1, checkpointing=False)
    layer = qwen.base_model(model).model.layers[0]
    hidden = qwen.SHAPES[shape]["hidden_size"]
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16)
    if name == "mlp":
        return _module_body("mlp", layer.mlp, (x[0],), {}, tiled=(0,))
    rotary = qwen.base_model(model).model.rotary_emb
    cos, sin = rotary(x, torch.arange(tokens, device=device)[None])
    return _module_body("layer", layer, (x, cos, sin), {"attention_mask": None})


def _head(shape: str, tokens: int, device: str) -> Body:
    numbers = qwen.SHAPES[shape]
    vocab, width = numbers["vocab_size"], numbers["hidden_size"]
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(vocab, width, device=device, dtype=torch.bfloat16) * qwen.WEIGHT_STD
    target = torch.randint(0, vocab, (tokens,), device=device)

    def forward(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logps = torch.log_softmax(F.linear(hidden, weight).float(), -1)
        logp = logps.gather(-1, target[:, None])[:, 0]
        return logp, -(logps.exp() * logps).sum(-1)

    # forward, its recompute in the vjp, and the product of the gradient with the frozen weight
    flops = 6.0 * tokens * width * vocab
    return Body("head", forward, (hidden, weight, target), (0, 2), (0,), flops)


def _module_body(
    name: str,
    module: nn.Module,
    inputs: Sequence[Tensor],
    options: dict[str, object],
    tiled: tuple[int, ...] = (),
) -> Body:
    names = [key for key, _ in module.named_parameters()]
    parameters = [parameter.detach() for _, parameter in module.named_parameters()]
    wanted = [at for at, (_, p) in enumerate(module.named_parameters()) if p.requires_grad]
    count = len(inputs)

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        tensors, values = given[:count], dict(zip(names, given[count:], strict=True))
        keywords = dict(options)
        if count == 3:  # a decoder layer: hidden states and the rotary tables
            keywords["position_embeddings"] = (tensors[1], tensors[2])
        output = torch.func.functional_call(module, values, (tensors[0],), keywords)
        return output if isinstance(output, tuple) else (output,)

    tokens = inputs[0].shape[:-1].numel()
    weights = sum(p.numel() for p in parameters if p.dim() > 1)
    return Body(
        name,
        forward,
        (*inputs, *parameters),
        tiled,
        (0, *(count + at for at in wanted)),
        6.0 * tokens * weights,
    )


if __name__ == "__main__":
    main()
