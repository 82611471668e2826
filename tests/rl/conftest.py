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
functions = ["length"]
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


@pytest.fixture
def config_file(tmp_path, monkeypatch) -> Path:
    """``CONFIG`` with its eight questions, in the working directory."""
    monkeypatch.chdir(tmp_path)
    lines = [f'{{"prompt": "count to {i}", "answer": "{i % 3}"}}' for i in range(8)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    return file
