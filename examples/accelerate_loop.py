"""A loop of accelerate: the one changed line is ``step = fxrl.optimize(model, loss_fn)``.

    accelerate launch examples/accelerate_loop.py        # or python, for one process

The step is made of the model that ``prepare`` returned: under DistributedDataParallel it runs
inside the wrapper, so gradients are reduced, and accumulated by ``accumulate``, as without it.
"""

import torch
from accelerate import Accelerator

import fxrl
from fxrl.losses import sft
from fxrl.models import load_model

TEXTS = ["one and one is two", "two and two is four", "four and four is eight", "and so on and on"]


def main(epochs=3, config=None):
    """Trains; the loss of each step."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model, tokenizer = load_model("tiny:qwen3")

    def collate(texts):
        batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
        return batch | {
            "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        }

    data = torch.utils.data.DataLoader(TEXTS, batch_size=2, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = fxrl.optimize(model, sft(), config)
    losses = []
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(model):
                loss, _ = step(batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, step


if __name__ == "__main__":
    # Of a tiny model every rewrite saves little.
    losses, step = main(config=fxrl.Config(min_saved_bytes=0))
    print(step.report)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
