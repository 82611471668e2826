"""Checkpoints from which a run goes on exactly as if it had not stopped.

``run_dir/checkpoints/step-00000012/``

| file | what |
| --- | --- |
| ``adapter_model.safetensors``, ``adapter_config.json`` | the adapter; PEFT loads the folder |
| ``model*.safetensors``, ``config.json``, tokenizer | all weights; transformers loads the folder |
| ``value_head.safetensors`` | a value head, if there is one |
| ``trainable.safetensors`` | parameters that those do not hold as they are, if there are any |
| ``optimizer.pt`` | state of optimizer and schedule |
| ``state.pt`` | random states: torch, CUDA, python, numpy, the engine's sampler |
| ``trainer.json`` | step, data position, counters, configuration, fingerprints |
| ``manifest.json`` | of all these; see ``fxrl.rl.loop.store`` |
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from fxrl.errors import optional
from fxrl.models.hf import save_beside, save_pretrained, save_value_head
from fxrl.models.lora import is_adapted
from fxrl.rl.config.load import differences, with_defaults
from fxrl.rl.config.tables import Dtype
from fxrl.rl.errors import CheckpointError
from fxrl.rl.loop import store
from fxrl.rl.report.files import Tell

# May differ between a run and its continuation: they change no number of a step, or others compare
# them (rows are told by the fingerprints of the data, wherever they lie).
_FREE = {
    *("data.rows", "data.path", "eval.rows", "eval.path", "eval.every", "run_dir", "steps"),
    *("epochs", "save_every", "keep_checkpoints", "max_nonfinite", "model.sharded"),
    *("log_completions", "tensorboard", "log_to", "project", "push_to_hub", "hub_strategy"),
    *("disk_retries", "disk_wait_s", "engine_retries", "reward.timeout_s", "reward.retries"),
    *("vllm.generate_timeout_s", "vllm.gpu_memory", "vllm.log_level", "vllm.trainer_reserve"),
    "fxrl.context_parallel",
}
ADAPTER, REST = "adapter_model.safetensors", "trainable.safetensors"


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
    branch: int = 1,
    parent: str | None = None,
    model: nn.Module,
    tokenizer: Any = None,
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    trainer: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint, then delete all but the newest ``keep`` of its branch; ``parent`` as in
    ``store.Manifest``. Raises ``StorageError`` if it could not be written; older checkpoints are
    then untouched."""

    def fill(folder: Path) -> None:
        _save_model(model, tokenizer, folder)
        with _writing("optimizer.pt"):
            _save(optimizer, folder / "optimizer.pt")
        with _writing("state.pt"):
            _save(state, folder / "state.pt")
        with _writing("trainer.json"):
            (folder / "trainer.json").write_text(json.dumps({"step": step, **trainer}, indent=1))

    return store.write(run_dir, store.Place(branch, step), parent, fill, keep)


def _save(values: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(dict(values), file)
        except RuntimeError as error:  # which hides what the system has said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def _save_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Save a folder that PEFT or transformers loads; what that does not hold exactly goes beside
    it."""
    own = trainable(model)
    if (config := _adapter(model)) is not None:
        names = _adapter_names(model, own)
        with _writing(ADAPTER):
            save_beside({names[name]: own[name] for name in names}, folder, ADAPTER)
        config.inference_mode = True  # as PEFT saves them: what loads it does not train it
        config.save_pretrained(str(folder))
        with _writing("value_head.safetensors"):
            save_value_head(model, folder)
    elif hasattr(model, "save_pretrained"):
        with _writing("model.safetensors"):
            save_pretrained(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    held = _read_weights(folder, model)
    if rest := {name: value for name, value in own.items() if name not in held}:
        with _writing(REST):
            save_beside(rest, folder, REST)


def _adapter(model: nn.Module) -> Any:
    """A copy of the configuration of the PEFT adapter that is trained; ``None`` without one."""
    if not is_adapted(model):
        return None
    wrapped: Any = model
    return copy.copy(wrapped.peft_config[wrapped.active_adapter])


def _adapter_names(model: nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """PEFT's name in a file of each of its own parameters, by the model's name."""
    peft = optional("peft", "a checkpoint")
    named = peft.get_peft_model_state_dict(
        model, state_dict=dict(own), adapter_name=model.active_adapter, save_embedding_layers=False
    )
    ours = {id(value): name for name, value in own.items()}
    return {ours[id(value)]: name for name, value in named.items() if id(value) in ours}


def _read_weights(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The trainable parameters of ``model`` that the folder has in the same shape and dtype, by
    the model's names; read from the disk when they are used."""
    safetensors = optional("safetensors", "a checkpoint")
    own = trainable(model)
    names = {} if _adapter(model) is None else _adapter_names(model, own)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with (
            restoring(folder, file.name),
            safetensors.safe_open(str(file), framework="pt") as opened,
        ):
            stored = set(opened.keys())
            for name, value in own.items():
                there = names.get(name, name) if file.name == ADAPTER else name
                if there in stored:
                    tensor = opened.get_tensor(there)
                    if (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
                        found[name] = tensor
    return found


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, the one that was written last at the end."""
    return [place.under(run_dir) for place in store.list_places(run_dir)]


SOUND = "sound"
"""As ``--resume``: the newest checkpoint that is not damaged."""


def find_checkpoint(run_dir: Path, resume: str, tell: Tell = lambda text: None) -> Path | None:
    """The checkpoint to resume from, checked byte by byte; ``None`` if ``run_dir`` has none yet.

    ``resume`` is empty for the last one of ``run_dir``, ``SOUND`` for the last undamaged one
    (``tell`` hears which were skipped, and why), or the folder of a checkpoint or run. Raises
    ``CheckpointError`` if it is damaged (naming the newest sound one), or no checkpoint.
    """
    if resume == SOUND:
        found = store.newest_sound(run_dir, tell)
        if found is None and list_checkpoints(run_dir):
            raise CheckpointError(f"--resume={SOUND}: {run_dir} has no checkpoint that is sound")
        return found
    asked = Path(resume) if resume else run_dir
    there = list_checkpoints(asked)
    if there:
        asked = there[-1]
    elif not resume:
        return None
    elif not any((asked / name).exists() for name in (store.MANIFEST, "trainer.json")):
        raise CheckpointError(
            f"--resume {asked}: no checkpoint there; give a run's folder or one of its "
            f"{store.FOLDER}/step-* folders"
        )
    try:
        store.verify(asked)
    except CheckpointError as error:
        sound = store.newest_sound(asked.absolute().parents[1])
        cure = "no other is there" if sound is None else f"the newest sound one is {sound}"
        if sound is not None and not resume:
            cure += f"; --resume={SOUND} goes on there, in a new branch"
        raise CheckpointError(f"{error}; {cure}") from error
    return asked


_COUNTS = ("step", "position", "num_tokens", "num_skipped", "num_skipped_in_a_row")
_TABLES = ("config", "initial", "fingerprints")


def read_trainer(path: Path) -> dict[str, Any]:
    """What ``trainer.json`` holds, which is checked."""
    try:
        found = json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: trainer.json cannot be read: {error}") from error
    table = found if isinstance(found, dict) else {}
    wrong = [
        name for name in _COUNTS if type(table.get(name)) is not int or not 0 <= table[name] < 2**63
    ]
    wrong += [name for name in _TABLES if not isinstance(table.get(name), dict)]
    if not wrong:
        values = table["initial"].values()
        model = table["config"].get("model")
        sound = {
            "step": table["step"] == store.read_manifest(path).step,
            "initial": all(value is None or type(value) in (int, float) for value in values),
            # The dtypes are those of the run that goes on, where its configuration says auto.
            "config.model": isinstance(model, dict)
            and model.get("dtype") in get_args(Dtype)
            and model.get("autocast", "") in (None, "auto", "bfloat16"),
        }
        wrong = [name for name, good in sound.items() if not good]
    if wrong:
        raise CheckpointError(
            f"{path}: trainer.json is of no run: {', '.join(wrong)} missing or out of range; take "
            "another checkpoint"
        )
    return table


def check_same_run(path: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises where the two configurations would not go on alike. A key that is newer than the
    checkpoint had its default."""
    # A decaying schedule ends at the last step, so for it `steps` matters as well.
    free = _FREE if present["optim"]["schedule"] == "constant" else _FREE - {"steps"}
    differing = differences(with_defaults(saved, present), present)
    changed = [line for line in differing if line.partition(":")[0] not in free]
    if changed:
        lines = "\n  ".join(changed)
        raise CheckpointError(
            f"{path} was written with another configuration:\n  {lines}\n"
            "give the same values, or start a new run with another run_dir"
        )


def load_checkpoint(path: Path, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore the trainable parameters in place. Returns the ``optimizer`` and ``state`` mappings
    given to ``save_checkpoint``; their tensors are read from disk when they are used, so that a
    rank reads only its part of the optimizer's states."""
    own = trainable(model)
    weights = _read_weights(path, model)
    if wrong := sorted(own.keys() - weights.keys()):
        raise CheckpointError(f"{path}: parameters do not fit the model: {', '.join(wrong[:5])}")
    loaded = []
    for name in ("optimizer.pt", "state.pt"):
        with restoring(path, name):
            found = torch.load(path / name, weights_only=True, map_location="cpu", mmap=True)
            if not isinstance(found, dict):
                raise TypeError(f"{type(found).__name__} where a dictionary must be")
            loaded.append(found)
    for name, value in weights.items():
        own[name].copy_(value)
    return loaded[0], loaded[1]


@contextmanager
def restoring(path: Path, what: str) -> Iterator[None]:
    """Around the use of a part of a checkpoint, which may hold anything: every exception becomes a
    ``CheckpointError`` that names the part."""
    try:
        yield
    # Neither safetensors nor pickle nor what takes a state has a common error class for it.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path}: {what} cannot be read: {reason}; take another checkpoint"
        ) from error
