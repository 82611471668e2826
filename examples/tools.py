"""A calculator as a tool: the model calls it in its first turn, and says the sum in its second.

    python examples/tools.py

A tiny random model is first shown what calls look like (plain PyTorch, some seconds); rewards then
teach it which numbers to add. A minute on two cores, no download.
"""

import torch

from fxrl.models import load_model
from fxrl.rl import Trainer


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


def right(completions, answer, **columns):
    """1 where the calculator said the answer, and then the model; the prompt's own words do not."""
    return [
        float(len(turns) == 3 and turns[1]["content"] == turns[2]["content"] == sum_)
        for turns, sum_ in zip(completions, answer, strict=True)
    ]


ROWS = [{"prompt": "Make 4.", "answer": "4"}]
CONFIG = {
    "run_dir": "runs/tools",
    "steps": 24,
    "prompts_per_step": 1,
    "sampling": {"max_tokens": 128, "num_generations": 32},
    "optim": {"lr": 5e-4},
    "fxrl": {"min_saved_bytes": 0},  # rewrite however little it saves: the model is tiny
}


def conversation(a, b):
    """Messages that make ``a + b``."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": f"Make {a + b}."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def show(model, tokenizer, steps):
    """Some steps of next-token prediction on conversations."""
    texts = [
        tokenizer.apply_chat_template(conversation(a, b), tools=[add], tokenize=False)
        for a in range(5)
        for b in range(5)
    ]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main(config=CONFIG, shown=100):
    """Trains; the model is shown conversations for ``shown`` steps before."""
    torch.manual_seed(0)
    model, tokenizer = load_model("tiny:qwen3", "float32", "cpu")
    print(f"showing the model what calls look like: {shown} steps", flush=True)
    show(model, tokenizer, shown)
    trainer = Trainer(model, right, ROWS, config, tokenizer=tokenizer, tools=[add])
    return trainer.train(overwrite=True)


if __name__ == "__main__":
    summary = main().summary
    print(f"reward {summary['reward, first steps']:.2f}, then {summary['reward, last steps']:.2f}")
