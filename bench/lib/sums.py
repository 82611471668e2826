"""What ``bench.learn`` has SmolLM2-135M learn in a minute or a few: sums, in four ways.

    sft     the answers to questions such as "What is 3 + 4?", of one digit
    dpo     to prefer the right answer to a wrong one nearby
    grpo    to say the right answer, from rewards alone, after two that it is shown
    tools   GRPO: differences of four digits, too hard for it, with a calculator: it calls that in
            its first turn, with the numbers in the order that the question asks for, which is not
            always the one they stand in, and says in its second turn what it heard. It was shown
            what calls look like, with the numbers in either order; the rewards alone say which

Each is a file for ``fxrl train``, rows, and how much a held-out measure has to gain by it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxrl.models import load_model
from fxrl.models.tiny import CHAT_TEMPLATE

_SMALL, _LARGE = range(10), range(1000, 10000)
_SHOWN_STEPS = 12
_WORDINGS = ("What is {large} - {small}?", "Take {small} from {large}.")
_COMMON = """\
save_every = 0
tensorboard = false
prompts_per_step = {prompts}
micro_batch_tokens = 32768

[optim]
lr = {lr}
weight_decay = 0.0
schedule = "linear"
warmup_steps = {warmup}

[eval]
size = 32
every = {every}
"""


@dataclass(frozen=True)
class Task:
    """One way to learn sums.

    Attributes:
        config: the file, but for ``[model]`` and ``data.path``.
        rows: its data.
        measure: metric of evaluations; a loss gains by falling.
        gain: what it has to gain at least, for every seed.
        before: of the untrained model, where evaluations do not say it.
    """

    config: str
    rows: Callable[[], list[dict[str, Any]]]
    measure: str
    gain: float
    before: float | None = None


def write(name: str, folder: Path, model: str) -> Path:
    """The file for ``fxrl train``, its data, and for tools the model with a template of calls.

    Args:
        name: a key of ``TASKS``.
        model: ``model.id``.
    """
    task = TASKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "tools":
        model = str(_with_calls(model, folder / "model"))
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in task.rows()))
    path = folder / f"{name}.toml"
    path.write_text(task.config.replace("DATA", str(data)).replace("MODEL", model))
    return path


def _with_calls(source: str, folder: Path) -> Path:
    """The model with a chat template that writes tools and their calls, and shown some of these.

    Eight conversations a step of next-token prediction, twelve steps: it then writes calls, with
    the numbers in an order of chance.
    """
    torch.manual_seed(0)
    draw = random.Random(1)
    model, tokenizer = load_model(source, "float32", "cpu")
    tokenizer.chat_template = CHAT_TEMPLATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(_SHOWN_STEPS):
        talks = [_conversation(*draw.sample(_LARGE, 2), draw.choice(_WORDINGS)) for _ in range(8)]
        batch = tokenizer.apply_chat_template(
            talks,
            tools=[subtract],
            padding=True,
            tokenizer_kwargs={"padding_side": "right"},
            return_dict=True,
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def one_digit() -> list[dict[str, Any]]:
    """All sums and differences >= 0 of two digits, each with a wrong answer at most 3 away."""
    draw = random.Random(0)
    rows = []
    for a in _SMALL:
        for b in _SMALL:
            for sign, right in (("+", a + b), ("-", a - b)):
                if right < 0:
                    continue
                wrong = [right + d for d in (-3, -2, -1, 1, 2, 3) if right + d >= 0]
                rows.append(
                    {
                        "prompt": f"What is {a} {sign} {b}?",
                        "answer": str(right),
                        "chosen": f" {right}",
                        "rejected": f" {draw.choice(wrong)}",
                    }
                )
    return rows


def four_digits() -> list[dict[str, Any]]:
    """Questions of either wording."""
    draw = random.Random(0)
    rows = []
    for _ in range(600):
        small, large = sorted(draw.sample(_LARGE, 2))
        question = draw.choice(_WORDINGS).format(small=small, large=large)
        rows.append(
            {"prompt": [{"role": "user", "content": question}], "answer": str(large - small)}
        )
    return rows


def _conversation(a: int, b: int, wording: str) -> list[dict[str, Any]]:
    """A question, and a call that gives ``a - b``."""
    question = wording.format(small=min(a, b), large=max(a, b))
    call = {"type": "function", "function": {"name": "subtract", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "subtract", "content": str(a - b)},
        {"role": "assistant", "content": f"It is {a - b}."},
    ]


def subtract(a: int, b: int) -> int:
    """Subtracts a number from another.

    Args:
        a: the one that is subtracted from.
        b: the one that is subtracted.
    """
    return a - b


def told(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the calculator said the answer, and then the model, in two turns."""
    return [
        float(
            len(turns) == 3
            and turns[1]["content"] == right
            and turns[2]["content"] == f"It is {right}."
        )
        for turns, right in zip(completions, answer, strict=True)
    ]


_EXAMPLES = """
[model]
id = "MODEL"

[data]
path = "DATA"
chat = false
"""
TASKS = {
    "sft": Task(
        "steps = 20\n"
        + _COMMON.format(prompts=16, lr="5e-5", warmup=3, every=5)
        + _EXAMPLES
        + 'columns = { completion = "chosen" }\n[loss]\nname = "sft"\n',
        one_digit,
        "loss",
        4.0,
    ),
    "dpo": Task(
        "steps = 20\n"
        + _COMMON.format(prompts=16, lr="5e-5", warmup=3, every=5)
        + _EXAMPLES
        + '[loss]\nname = "dpo"\n',
        one_digit,
        "rewards/accuracies",
        0.3,
        before=0.5,  # the policy is its reference: of no pair does it prefer either answer
    ),
    "grpo": Task(
        "steps = 200\n"
        + _COMMON.format(prompts=16, lr="3e-4", warmup=5, every=50)
        + """
[model]
id = "MODEL"
dtype = "auto"
lora = { r = 16, alpha = 32 }

[data]
path = "DATA"
system = "Answer with only the final result."
few_shot = 2

[reward]
functions = ["exact"]
extract = '-?\\d+'

[loss]
name = "dapo"

[sampling]
num_generations = 8
max_tokens = 8
""",
        one_digit,
        "accuracy",
        0.3,
    ),
    "tools": Task(
        "steps = 12\n"
        + _COMMON.format(prompts=2, lr="5e-4", warmup=1, every=6)
        + f"""
[model]
id = "MODEL"
dtype = "auto"
lora = {{ r = 16, alpha = 32 }}

[data]
path = "DATA"

[rollout]
tools = ["{Path(__file__).resolve()}:subtract"]

[reward]
functions = ["{Path(__file__).resolve()}:told"]

[loss]
name = "dapo"

[sampling]
num_generations = 8
max_tokens = 72
""",
        four_digits,
        "accuracy",
        0.3,
    ),
}
