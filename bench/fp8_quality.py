"""How near FP8 comes on real weights: cosines of products and gradients with those in fp32.

SmolLM2-135M-Instruct with an adapter whose B is drawn (at zero A has no gradient), in fp32; four
chats, a policy gradient over the answers' tokens. Products are rounded as a step with
``precision="fp8"`` rounds them (``fxrl.inspect.emulate``), so no GPU is needed. Rows:

    Linear   one product alone, of the rows and output gradients that fp32 has there: the least of
             what it gives and of its rows' gradient
    layer    one decoder layer alone: its adapters' gradients, from the same input and gradient
    step     the whole model: each layer's adapters' gradients
    in step  as Linear, of the rows and gradients that a step of FP8 products has there
    bf16     the same as step, of the model in bf16, nothing rounded to FP8

and for each the least, the median and how many are at least 0.999.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from bench.lib import common
from fxrl import Config, optimize
from fxrl.inspect.calibrate import LEAST_COSINE, nearness_in
from fxrl.inspect.emulate import Emulation
from fxrl.models import load_model, lora
from fxrl.ops.fp8 import Recipe, quantized_weight
from fxrl.ops.rounded import RoundedWeight

CHATS = (
    ("What is the capital of France?", "The capital of France is Paris, on the river Seine."),
    (
        "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
        "In May she sold 48 / 2 = 24 clips. In all she sold 48 + 24 = 72 clips.",
    ),
    ("Name three colours of the rainbow.", "Red, green and violet are three of its colours."),
    ("Write a line about the sea.", "The sea keeps its own slow time, and the cliffs listen."),
)
ADVANTAGES = (1.0, -0.5, 0.7, -1.2)
#: A weight's scales, and what the rows' gradient is a product of.
WAYS: tuple[tuple[Recipe, Literal["fp8", "bf16"]], ...] = (
    ("row", "fp8"),
    ("row", "bf16"),
    ("block", "bf16"),
    ("tensor", "fp8"),
)
COLUMNS = ("scales", "gradient", "of", "least", "at", "median", "fine", "count")


class Probe:
    """The model, its loss, and what each layer reads and gets in fp32."""

    def __init__(self) -> None:
        model, tokenizer = load_model("smollm2", "fp32")
        model.config.use_cache = False  # type: ignore[union-attr]
        self.model: Any = lora(model, r=8, seed=0)
        torch.manual_seed(0)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        self.batch = _batch(tokenizer)
        self.layers: list[Any] = [*self.model.base_model.model.model.layers]
        named = self.model.named_modules()
        self.linears = {n: m for n, m in named if n.endswith("base_layer")}
        self.seen: dict[str, list[Any]] = {}
        self.truth = self.gradients(self._watch)

    def gradients(self, watched: Callable[[], Any] = lambda: None) -> list[Tensor]:
        """Each layer's adapters', flat."""
        handles = watched() or []
        self.model.zero_grad()
        policy_loss(self.model, self.batch).backward()
        for handle in handles:
            handle.remove()
        return [_adapters(layer) for layer in self.layers]

    def _watch(self) -> list[Any]:
        modules = {**self.linears, **{str(i): layer for i, layer in enumerate(self.layers)}}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                made = out[0] if isinstance(out, tuple) else out
                seen = self.seen[name] = [args, kwargs, None]
                made.register_hook(lambda grad: seen.__setitem__(2, grad.detach()))

            return hook

        embeddings = self.model.get_input_embeddings()
        handles = [embeddings.register_forward_hook(lambda m, a, out: out.requires_grad_())]
        return handles + [
            module.register_forward_hook(note(name), with_kwargs=True)
            for name, module in modules.items()
        ]

    def alone(self, index: int, rounding: AbstractContextManager[Any]) -> Tensor:
        """A layer's adapters' gradients, from what it has in fp32."""
        (hidden, *args), kwargs, grad = self.seen[str(index)]
        self.model.zero_grad()
        with rounding:
            made = self.layers[index](hidden.detach().requires_grad_(), *args, **kwargs)
            (made[0] if isinstance(made, tuple) else made).backward(grad)
        return _adapters(self.layers[index])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures."""
    parser = common.parser(__doc__)
    args: argparse.Namespace = parser.parse_args(argv)
    notes = ["SmolLM2-135M-Instruct, out of 4 bits; LoRA r=8 on all Linears, B of std 0.02"]
    results = common.Results(
        "FP8 on SmolLM2's weights", COLUMNS, args.out, notes, as_json=args.json
    )
    probe = Probe()
    for recipe, gradient in WAYS:
        rounded = {
            name: RoundedWeight(
                linear.weight, False, *quantized_weight(linear.weight.detach(), recipe), gradient
            )
            for name, linear in probe.linears.items()
        }
        for of, cosines in _measured(probe, rounded):
            results.add(scales=recipe, gradient=gradient, of=of, **_summary(cosines))
    asked = Config(precision="fp8", compile_regions=False, min_saved_bytes=0)
    calibrated = optimize(probe.model, policy_loss, asked).calibrate(probe.batch)
    for gradient, config in (("fp8", asked), ("calibrated", calibrated)):
        near = nearness_in(optimize(probe.model, policy_loss, config), probe.batch)
        cosines = {one.module: min(one.product, one.gradient) for one in near}
        results.add(scales="row", gradient=gradient, of="in step", **_summary(cosines))
    widened = sum(one.widened for one in near)
    results.note(f"calibrated: of {len(near)} products in FP8 {widened} have the gradient in full")
    probe.model.to(torch.bfloat16)
    found = dict(zip(_names(probe), map(_cosine, probe.gradients(), probe.truth), strict=True))
    results.add(of="bf16", **_summary(found))
    results.finish()
    return 0


def _measured(
    probe: Probe, rounded: dict[str, RoundedWeight]
) -> Iterable[tuple[str, dict[str, float]]]:
    alone = {}
    for name, weight in rounded.items():
        (rows,), _, grad = probe.seen[name]
        rows, grad, whole = rows.flatten(0, -2), grad.flatten(0, -2), weight.source.detach()
        product = _cosine(weight.product(rows), rows @ whole.t())
        alone[name] = min(product, _cosine(weight.rows_gradient(grad), grad @ whole))
    yield "Linear", alone
    groups = groupby(rounded.items(), lambda item: _layer_of(item[0]))
    inside = {index: [weight for _, weight in group] for index, group in groups}
    yield (
        "layer",
        {
            name: _cosine(probe.alone(i, Emulation(inside[i])), probe.alone(i, nullcontext()))
            for i, name in enumerate(_names(probe))
        },
    )
    with Emulation([*rounded.values()]):
        found = probe.gradients()
    yield "step", dict(zip(_names(probe), map(_cosine, found, probe.truth), strict=True))


def policy_loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A policy gradient, by token."""
    ids, attended, answers = batch
    logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1]
    logps = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp(logps - logps.detach())
    weights = torch.tensor(ADVANTAGES)[:, None] * answers[:, 1:]
    return -(ratio * weights).sum() / answers.sum()


def _batch(tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, what is attended to, and the answers' mask; [chats, longest] each."""
    rows = []
    for question, answer in CHATS:
        turns = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        turns.append({"role": "assistant", "content": answer})
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        rows.append(
            [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, whole)]
        )
    longest = max(len(whole) for _, whole in rows)
    padded = [whole + [tokenizer.pad_token_id] * (longest - len(whole)) for _, whole in rows]
    place = torch.arange(longest)
    ends = torch.tensor([[len(asked), len(whole)] for asked, whole in rows])
    attended = place < ends[:, 1:]
    return torch.tensor(padded), attended.long(), ((place >= ends[:, :1]) & attended).float()


def _adapters(layer: nn.Module) -> Tensor:
    found = [p.grad.flatten().double() for p in layer.parameters() if p.grad is not None]
    return torch.cat(found)


def _layer_of(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None
    return int(found[1])


def _names(probe: Probe) -> list[str]:
    return [f"layers.{i}" for i in range(len(probe.layers))]


def _cosine(one: Tensor, other: Tensor) -> float:
    flat = (each.detach().flatten().double() for each in (one, other))
    return float(cosine_similarity(*flat, dim=0))


def _summary(cosines: dict[str, float]) -> dict[str, Any]:
    ordered = sorted(cosines, key=cosines.__getitem__)
    worst, middle = ordered[0], ordered[len(ordered) // 2]
    fine = sum(cosine >= LEAST_COSINE for cosine in cosines.values())
    at = worst.partition(".model.layers.")[2].removesuffix(".base_layer") or worst
    least, median = round(cosines[worst], 5), round(cosines[middle], 5)
    return {"least": least, "at": at, "median": median, "fine": fine, "count": len(cosines)}


if __name__ == "__main__":
    sys.exit(main())
