"""Memory of the loss head on the CPU: log-prob and entropy with gradient, eager against fxrl.

The head is a trainable ``Linear(H, V)`` in fp32; the loss is a clipped policy gradient minus an
entropy bonus, all in plain PyTorch. Each variant runs in its own process, so neither inherits the
other's heap. The peak is the highest resident set during one step over the one just before it
(``VmHWM`` after a reset through ``/proc/self/clear_refs``), so it holds gradients as well.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.lib import common
from bench.lib.child import measured, tell

COLUMNS = ("variant", "peak_over_base_mib", "step_s", "first_call_s", "loss", "grad_norm", "error")


class Head(nn.Module):
    """A hidden layer and the output head, the two ends of a policy."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.body = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.body(hidden)))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Clipped policy gradient with an entropy bonus of 0.01, temperature 0.7."""
    logps = torch.log_softmax(model(batch["hidden"]).float() / 0.7, -1)
    logp = logps.gather(-1, batch["target"][..., None])[..., 0]
    entropy = -(logps.exp() * logps).sum(-1)
    ratio = torch.exp(logp - batch["old"])
    clipped = torch.minimum(ratio * batch["adv"], ratio.clamp(0.8, 1.2) * batch["adv"])
    return ((-clipped - 0.01 * entropy) * batch["mask"]).sum() / batch["mask"].sum()


def main() -> None:
    args = _arguments()
    if args.child:
        tell(_child(args))
        return
    logits = args.tokens * args.vocab * 4 / 2**20
    weight = args.hidden * args.vocab * 4 / 2**20
    notes = [
        f"N={args.tokens} H={args.hidden} V={args.vocab} fp32, trainable head: one [N, V] tensor "
        f"is {logits:.0f} MiB, the head's gradient {weight:.1f} MiB",
        f"{torch.get_num_threads()} threads; each variant in a process of its own",
    ]
    results = common.results(args, "Loss head on the CPU: peak over base", COLUMNS, notes)
    for variant in args.variants:
        words = ["-m", "bench.head_memory", "--child", variant, *sys.argv[1:]]
        results.add(variant=variant, **measured(words))
    results.finish()


def _child(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Head(args.hidden, args.vocab)
    batch = {
        "hidden": torch.randn(args.rows, args.tokens // args.rows, args.hidden),
        "target": torch.randint(0, args.vocab, (args.rows, args.tokens // args.rows)),
    }
    shape = batch["target"].shape
    batch |= {"old": 0.1 * torch.randn(shape) - 10.8, "adv": torch.randn(shape)}
    batch["mask"] = (torch.rand(shape) < 0.9).float()
    step = _step(args.child, model)

    def run() -> torch.Tensor:
        loss = step(batch)
        loss.backward()
        return loss.detach()

    start = time.perf_counter()
    run()
    first_s = time.perf_counter() - start
    peaks, times, loss = [], [], torch.zeros(())
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        base = _reset_peak()
        start = time.perf_counter()
        loss = run()
        times.append(time.perf_counter() - start)
        peaks.append(_status_mib("VmHWM") - base)
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    return {
        "peak_over_base_mib": max(peaks[1:]),
        "step_s": sorted(times)[1],
        "first_call_s": first_s,
        "loss": loss.item(),
        "grad_norm": norm.item(),
    }


def _step(variant: str, model: nn.Module) -> Any:
    if variant == "eager":
        return lambda batch: loss_fn(model, batch)
    if variant == "compile":
        compiled = torch.compile(loss_fn)
        return lambda batch: compiled(model, batch)
    import fxrl

    return fxrl.optimize(model, loss_fn)


def _reset_peak() -> float:
    """Gives free pages back, resets ``VmHWM``, returns the resident set in MiB."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=50000)
    parser.add_argument("--variants", default="eager,fxrl", type=common.words)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
