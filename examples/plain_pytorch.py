"""Your own loop: the one changed line is ``step = fxrl.optimize(model, loss_fn)``.

    python examples/plain_pytorch.py

Without it the loop calls ``loss_fn(model, batch)``; the numbers are the same. A tiny random model
learns a line of text: seconds on a CPU, no download.
"""

import torch

import fxrl
from fxrl.models import load_model

TEXT = "fxrl writes the loss and the model into one graph."


def loss_fn(model, batch):
    """The mean negative log-likelihood of the next token."""
    logits = model(input_ids=batch["ids"]).logits[:, :-1].float()
    logps = torch.log_softmax(logits, -1).gather(-1, batch["ids"][:, 1:, None])
    return -logps.mean()


def main(steps=20, config=None):
    """Trains; the loss of each step."""
    torch.manual_seed(0)
    model, tokenizer = load_model("tiny:qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"ids": torch.tensor([tokenizer(TEXT)["input_ids"]] * 2)}
    step = fxrl.optimize(model, loss_fn, config)
    losses = []
    for _ in range(steps):
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, step


if __name__ == "__main__":
    # Of a tiny model every rewrite saves little.
    losses, step = main(config=fxrl.Config(min_saved_bytes=0))
    print(step.report)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
