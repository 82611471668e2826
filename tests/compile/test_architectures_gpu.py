"""Every kind of model by compiled bodies on a GPU: layers and head rewritten, eager's gradients.

On a CPU the same bodies run op by op in ``test_architectures.py``; what Inductor makes of them, and
which strides the kernels return, shows here.
"""

import pytest
import torch

import fxrl
from fxrl import losses
from fxrl.models import TINY_KINDS, lora, tiny_config
from fxrl.passes import REGISTRY

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]

#: Two layers of 32 features: naming the passes asks for them at every size.
CONFIG = fxrl.Config(min_saved_bytes=0, on_miss="ignore", passes=tuple(REGISTRY))


def batch(rows: int, tokens: int, vocab: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    given = {
        "input_ids": torch.randint(0, vocab, (rows, tokens), generator=draw),
        "completion_mask": torch.ones(rows, tokens - 1),
        "old_logps": torch.full((rows, tokens - 1), -5.0),
        "advantages": torch.randn(rows, generator=draw),
    }
    return {name: value.cuda() for name, value in given.items()}


@pytest.mark.parametrize("kind", sorted(TINY_KINDS))
def test_compiled_layers_have_eagers_gradients(kind):
    config = tiny_config(kind, layers=2, hidden=64, intermediate=96, head_dim=16, experts=4)
    torch.manual_seed(0)
    model = lora(transformers.AutoModelForCausalLM.from_config(config), r=4).cuda().train()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:  # zero to begin with, which would hide A's gradient
            torch.nn.init.normal_(parameter, std=0.05)
    loss_fn = losses.grpo(beta=0.0)
    step = fxrl.optimize(model, loss_fn, CONFIG)
    for rows, tokens in ((2, 24), (3, 33)):
        given = batch(rows, tokens, config.vocab_size)
        found = torch.autograd.grad(step(given)[0], list(trained.values()))
        wanted = torch.autograd.grad(loss_fn(model, given)[0], list(trained.values()))
        off = torch.stack([(f - w).norm() for f, w in zip(found, wanted, strict=True)]).norm()
        assert off < 1e-4 * torch.stack([w.norm() for w in wanted]).norm()
    applied = {remark.pass_name for remark in step.report.of_kind("applied")}
    assert {"outline-layers", "recompute"} <= applied
    assert not [r for r in step.report.of_kind("missed") if r.pass_name in ("capture", "kernels")]
