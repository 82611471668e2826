"""Sharing on a GPU, with a fake of vLLM's model: memory, numbers, checksums."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fxrl.engines.weights.share.binder import share
from fxrl.models import QuantizedLinear
from tests.engines.weights.share.fake_vllm import FP8, checkpoint, fake_vllm, per_block, per_channel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
IDS = torch.randint(3, 300, (2, 11), generator=torch.Generator().manual_seed(0))


def allocated():
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("quantize", [None, per_channel, per_block])
def test_one_copy_of_the_weights(tmp_path, quantize):
    original = checkpoint(tmp_path, hidden=1024, intermediate=2048, heads=16, head_dim=64)
    fake = fake_vllm(original, quantize=quantize).to(DEVICE)
    before = allocated()
    model, report = share(fake, tmp_path, device=DEVICE)
    assert report.complete, str(report)
    assert allocated() - before < 0.01 * report.shared_bytes
    report.verify_again()
    if quantize is None:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(DEVICE)
        with torch.no_grad():
            assert torch.equal(model(IDS.to(DEVICE)).logits, plain(IDS.to(DEVICE)).logits)
    else:
        assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
        model(input_ids=IDS.to(DEVICE), labels=IDS.to(DEVICE)).loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


def test_an_fp8_layer_computes_what_the_cpu_does():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 200, generator=generator).to(FP8)
    grid = torch.rand(3, 2, generator=generator) + 0.5
    x = torch.randn(7, 200, generator=generator, dtype=torch.float64)
    outs = []
    for device in ("cpu", DEVICE):
        layer = QuantizedLinear(values.to(device), grid.to(device), "fp8")
        here = x.to(device).requires_grad_()
        out = layer(here)
        (grad,) = torch.autograd.grad(out.square().sum(), here)
        outs.append((out.detach().cpu(), grad.cpu()))
    torch.testing.assert_close(outs[0], outs[1])
