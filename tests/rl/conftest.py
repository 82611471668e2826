"""A run small enough for tests: one layer, short completions, and the eager loss for speed."""

from pathlib import Path

import pytest

CONFIG = """
steps = 4
save_every = 2
prompts_per_step = 2
tensorboard = false
optimize = false
log_completions = 2

[model]
id = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1"
device = "cpu"
lora = { r = 4, alpha = 8 }

[data]
path = "questions.jsonl"

[reward]
functions = ["length", "toy_rewards:even"]
params = { length = { target = 4 } }

[loss]
name = "grpo"
beta = 0.05

[sampling]
num_generations = 4
max_tokens = 8

[optim]
lr = 1e-2
"""

REWARD = """
def even(completions, completion_ids, **columns):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch) -> Path:
    """``CONFIG`` with its eight questions, in the working directory."""
    monkeypatch.chdir(tmp_path)
    lines = [f'{{"prompt": "count to {i}", "answer": "{i % 3}"}}' for i in range(8)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "toy_rewards.py").write_text(REWARD)
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    return file
