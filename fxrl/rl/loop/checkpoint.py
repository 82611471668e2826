"""Checkpoints from which a run goes on exactly as if it had not stopped.

``run_dir/checkpoints/step-00000012/``

| file | what |
| --- | --- |
| ``trainable.safetensors`` | parameters that require grad (the adapter, or all), by name |
| ``optimizer.pt`` | optimizer and schedule |
| ``state.pt`` | random states: torch, CUDA, python, numpy, the engine's sampler |
| ``trainer.json`` | step, data position, counters, the configuration |

A folder with a final name is complete: it is written under another name and renamed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fxrl.errors import optional
from fxrl.rl.config.load import differences
from fxrl.rl.errors import CheckpointError, StorageError
from fxrl.rl.report.files import why

FOLDER = "checkpoints"
# May differ between a run and its continuation: they change no number of a step.
_FREE = {
    "run_dir",
    "steps",
    "save_every",
    "keep_checkpoints",
    "log_completions",
    "tensorboard",
    "log_to",
    "project",
    "push_to_hub",
    "hub_strategy",
    "epochs",
    "max_nonfinite",
    "eval.every",
    "disk_retries",
    "disk_wait_s",
    "engine_retries",
    "reward.timeout_s",
    "reward.retries",
    "vllm.generate_timeout_s",
    "vllm.gpu_memory",
    "vllm.log_level",
    "vllm.trainer_reserve",
}


def random_state() -> dict[str, Any]:
    """State of every global generator, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, gauss),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores ``random_state``."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that require grad; tied ones once."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def save_checkpoint(
    run_dir: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    trainer: Mapping[str, Any],
    keep: int,
) -> Path:
    """Writes a checkpoint, then deletes all but the newest ``keep``.

    Raises:
        StorageError: it could not be written; older checkpoints are untouched.
    """
    folder = run_dir / FOLDER
    target = folder / f"step-{step:08d}"
    work, former = folder / f".writing-{step:08d}", folder / f".former-{step:08d}"
    weights = {name: value.contiguous() for name, value in trainable(model).items()}
    safetensors = optional("safetensors.torch", "a checkpoint")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in (work, former):
            shutil.rmtree(left_over, ignore_errors=True)
        work.mkdir()
        safetensors.save_file(weights, str(work / "trainable.safetensors"))
        torch.save(dict(optimizer), work / "optimizer.pt")
        torch.save(dict(state), work / "state.pt")
        (work / "trainer.json").write_text(json.dumps({"step": step, **trainer}, indent=1))
        if target.exists():
            os.replace(target, former)
        os.replace(work, target)
    # A full disk is an OSError, a RuntimeError of torch.save or a SafetensorError.
    except Exception as error:
        shutil.rmtree(work, ignore_errors=True)  # it takes the space that is short
        raise StorageError(
            f"the checkpoint of step {step} could not be written to {folder}: {why(error)}; free "
            "some space; older checkpoints are as they were"
        ) from error
    for old in [former, *list_checkpoints(run_dir)[:-keep]]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((run_dir / FOLDER).glob("step-????????"))


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The folder to resume from: the newest of ``run_dir``, or the one named.

    Args:
        resume: an empty text for the newest; else a checkpoint or a run's folder.

    Returns:
        ``None`` where the newest was asked for and there is none yet.

    Raises:
        CheckpointError: the one named is none.
    """
    if not resume:
        found = list_checkpoints(run_dir)
        return found[-1] if found else None
    path = Path(resume)
    if (path / "trainer.json").is_file():
        return path
    if found := list_checkpoints(path):
        return found[-1]
    raise CheckpointError(
        f"--resume {path}: no checkpoint there; give a run's folder or one of its "
        f"{FOLDER}/step-* folders"
    )


def read_trainer(path: Path) -> dict[str, Any]:
    """``trainer.json``.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: trainer.json cannot be read: {error}") from error
    return found


def check_same_run(path: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises where the two configurations would not go on alike.

    Raises:
        CheckpointError: lists what differs.
    """
    # A decaying schedule ends at the last step, so for it `steps` matters as well.
    free = _FREE if present["optim"]["schedule"] == "constant" else _FREE - {"steps"}
    changed = [d for d in differences(saved, present) if d.partition(":")[0] not in free]
    if changed:
        lines = "\n  ".join(changed)
        raise CheckpointError(
            f"{path} was written with another configuration:\n  {lines}\n"
            "give the same values, or start a new run with another run_dir"
        )


def load_checkpoint(path: Path, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restores the trainable parameters in place.

    Returns:
        The ``optimizer`` and ``state`` mappings given to ``save_checkpoint``.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
    """
    own, safetensors = trainable(model), optional("safetensors.torch", "a checkpoint")
    try:
        weights = safetensors.load_file(str(path / "trainable.safetensors"))
        optimizer = torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
        state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    # safetensors and pickle have no common error class for a damaged file.
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; take an older one") from error
    wrong = sorted(
        name
        for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    )
    if wrong:
        raise CheckpointError(f"{path}: parameters do not fit the model: {', '.join(wrong[:5])}")
    for name, value in weights.items():
        own[name].copy_(value)
    return optimizer, state
