"""Rows padded on the right need no attention mask: each tiny architecture, against rows alone."""

import pytest
import torch

from fxrl.engines import Completion
from fxrl.losses import by_name
from fxrl.models import TINY_KINDS, load_model
from fxrl.rl.loop.batching import make_batches
from fxrl.rl.types import of_completion

CPU = torch.device("cpu")
ROWS = ((3, 9), (7, 2), (1, 5), (12, 11))


def completions(vocab):
    g = torch.Generator().manual_seed(0)
    for prompt, length in ROWS:
        ids = torch.randint(1, vocab, (prompt + length,), generator=g).tolist()
        logps = (-torch.rand(length, generator=g) * 6).tolist()
        yield Completion(tuple(ids[:prompt]), tuple(ids[prompt:]), tuple(logps), "stop", 0)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_padded_batch_is_its_rows_one_by_one(kind):
    model, tokenizer = load_model(f"tiny:{kind}", torch.float64)
    rows = list(completions(min(len(tokenizer), model.config.get_text_config().vocab_size)))
    loss_fn = by_name("dapo", vllm_importance_sampling_correction=False)
    found = []
    for plan in ([(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]):
        model.zero_grad()
        made = [of_completion(*pair) for pair in zip(rows, [1.0, -0.5, 2.0, 0.3], strict=True)]
        batches = make_batches(made, plan, pad_token_id=0, device=CPU, dtype=torch.float64)
        parts = [loss_fn(model, batch)[0] for batch in batches]
        for part in parts:
            part.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((sum(float(part.detach()) for part in parts), grads))
    (loss, grads), (expected, alone) = found
    assert loss == pytest.approx(expected, rel=1e-6)
    for a, b in zip(grads, alone, strict=True):
        # Some architectures' norms work in float32 whatever the model's dtype is.
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-12
