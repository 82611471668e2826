"""Region bodies for the benchmarks: a tile of the loss head, an MLP, a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bench.lib import qwen
from fxrl.ir.region import InputSpec, Region

Function = Callable[..., tuple[Tensor, ...]]


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
    forward: Function
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
    layer = model.get_base_model().model.layers[0]
    hidden = qwen.SHAPES[shape]["hidden_size"]
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16)
    if name == "mlp":
        return _module_body("mlp", layer.mlp, (x[0],), {}, tiled=(0,))
    rotary = model.get_base_model().model.rotary_emb
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
