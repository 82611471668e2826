"""The rollout benchmarks' job: model folder, questions, reward, configuration, memory sampling."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any, Self

import torch

from bench.lib import qwen
from fxrl.models import build_from_config
from fxrl.models.tiny import BOS_ID, EOS_ID, PAD_ID, tiny_tokenizer

PROMPTS, GENERATIONS, RANK = 4, 8, 32
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
TORCHRUN_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "WANDB_DISABLED": "true",
}
SHAPE = "qwen3-1.7b"
LOSS = "dapo"
TOKENS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
PROMPT_TOKENS = 48
"""A prompt of ``questions`` has fewer: a token is a byte."""


def model_path(folder: Path, shape: str = SHAPE, layers: int | None = None) -> Path:
    """Where ``make_model`` puts the model."""
    return folder / (f"{shape}-random" if layers is None else f"{shape}-{layers}-layers-random")


def make_model(folder: Path, shape: str = SHAPE, layers: int | None = None) -> Path:
    """A model of that shape with random bf16 weights and a tokenizer of bytes, once.

    Args:
        shape: a key of ``qwen.SHAPES``.
        layers: overrides the shape's number of layers.
    """
    path = model_path(folder, shape, layers)
    if (path / "config.json").is_file():
        return path
    tiny_tokenizer().save_pretrained(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = qwen.make_config(shape, layers, **TOKENS, max_position_embeddings=16384)
    build_from_config(config, "bf16", device).to("cpu").save_pretrained(path)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return path


def write_shape(folder: str, shape: str, layers: int | None) -> None:
    """The configuration alone, for a vLLM that draws the weights itself."""
    known = {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    qwen.make_config(shape, layers, **TOKENS, **known).save_pretrained(folder)


def questions(count: int) -> list[str]:
    """Sums that need no chat template."""
    return [f"Question: what is {i % 97} + {i % 89}? Answer:" for i in range(count)]


def make_adapter(folder: Path, shape: str = SHAPE) -> Path:
    """A LoRA adapter with random A and B on all linear layers, as PEFT saves it, once."""
    path = folder / f"{shape}-adapter"
    if path.is_dir():
        return path
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path(folder, shape), dtype=torch.bfloat16)
    config = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False
    )
    get_peft_model(model, config).save_pretrained(path)
    return path


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Uniform noise: the job measures time, and equal rewards would leave nothing to train."""
    return [random.random() for _ in completions]


def write_config(
    folder: Path,
    run_dir: Path,
    *,
    length: int,
    steps: int,
    shape: str = SHAPE,
    layers: int | None = None,
) -> Path:
    """The job as a file for ``fxrl train``."""
    data = folder / "questions.jsonl"
    rows = [f'{{"prompt": "{text}"}}' for text in questions(512)]
    data.write_text("\n".join(rows) + "\n")
    path = folder / "fxrl.toml"
    path.write_text(
        f"""
run_dir = "{run_dir}"
engine = "vllm"
steps = {steps}
save_every = 0
prompts_per_step = {PROMPTS}
micro_batch_tokens = {GENERATIONS * (length + PROMPT_TOKENS)}
tensorboard = false
log_completions = 0

[model]
id = "{model_path(folder, shape, layers)}"
dtype = "bfloat16"
lora = {{ r = {RANK}, alpha = {RANK}, targets = "all-linear" }}

[data]
path = "{data}"
chat = false

[reward]
functions = ["bench.lib.rl_job:reward"]

[loss]
name = "{LOSS}"

[sampling]
num_generations = {GENERATIONS}
max_tokens = {length}
ignore_eos = true

[optim]
lr = 1e-5
"""
    )
    return path


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has written down of each step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class PeakMemory:
    """Highest use of a whole GPU as the driver counts it, from a thread; ``gib`` afterwards."""

    def __init__(self, interval_s: float = 0.02, device: int = 0) -> None:
        self.interval_s, self.device = interval_s, device
        self.highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            free, total = torch.cuda.mem_get_info(self.device)
            self.highest = max(self.highest, total - free)

    @property
    def gib(self) -> float | None:
        """GiB, this process's own CUDA context (about 0.5) included; ``None`` without a GPU."""
        return self.highest / 2**30 if self.highest else None
