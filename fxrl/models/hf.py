"""The doors to transformers, peft and the Hugging Face hub: imported late, quiet, asked once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fxrl.errors import FxrlError, optional, reason_of


class ModelError(FxrlError, ValueError):
    """A model id, path or configuration leads to no model; the message has the cure."""


class FetchError(FxrlError, RuntimeError):
    """A download, its verification or its conversion failed."""


HUB_TIMEOUT_S = 5.0


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Transformers draws none inside; they would go through the caller's own display."""
    logging = optional("transformers", "loading a model").utils.logging
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


VALUE_HEAD = "value_head"
"""The attribute of a policy that predicts the values of its states (``fxrl.losses.ppo``)."""
_USE_CACHE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def train_without_cache(model: Any) -> None:
    """Switches the KV cache off in the model's configuration, but not in what is saved of it."""
    _USE_CACHE.setdefault(model, model.config.use_cache)
    model.config.use_cache = False


def byte_level(
    vocab: list[str], merges: list[tuple[str, ...]], special: list[str], *, regex: bool, **told: Any
) -> Any:
    """A tokenizer of byte pairs, exact both ways, that pads on the left. ``special`` words are
    never taken apart; ``regex``: texts are taken apart as GPT-2's are before pairs are merged;
    ``told`` are options of ``PreTrainedTokenizerFast``. Raises ``MissingPackageError`` without
    transformers."""
    hf, tk = (optional(name, "a tokenizer") for name in ("transformers", "tokenizers"))
    numbered = {word: number for number, word in enumerate(vocab)}
    tokenizer = tk.Tokenizer(tk.models.BPE(vocab=numbered, merges=merges))
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.decoder = tk.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        clean_up_tokenization_spaces=False,  # would change decoded text; BPE has no need
        **told,
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has the mode it had (they need not agree)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def system_errors() -> Iterator[None]:
    """An error of the system that safetensors reports, in words and a class of its own, is an
    ``OSError`` here as well."""
    safetensors = optional("safetensors", "saving a model")
    try:
        yield
    except safetensors.SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def save_pretrained(model: Any, folder: Path) -> None:
    """The model's own ``save_pretrained``, without progress bars and as nobody trains it; a value
    head goes beside it (``save_value_head``)."""
    used_cache = _USE_CACHE.get(model)
    if used_cache is not None:
        model.config.use_cache = used_cache
    head = model._modules.pop(VALUE_HEAD, None)  # no causal LM has one, and loaders would say so
    try:
        with no_progress_bars(), system_errors():
            model.save_pretrained(str(folder))
    finally:
        if head is not None:
            setattr(model, VALUE_HEAD, head)
        if used_cache is not None:
            model.config.use_cache = False
    _as_other_files(folder)
    save_value_head(model, folder)


def save_value_head(model: nn.Module, folder: Path) -> None:
    """``value_head.safetensors`` with the model's value head, if it has one, by the model's names:
    ``model.load_state_dict(load_file(...), strict=False)`` takes it."""
    head: nn.Module | None = getattr(model, VALUE_HEAD, None)
    if head is not None:
        named = {f"{VALUE_HEAD}.{name}": p.detach() for name, p in head.named_parameters()}
        save_beside(named, folder, f"{VALUE_HEAD}.safetensors")


def load_value_head(head: nn.Module, folder: Path) -> None:
    """Gives ``head`` the numbers that ``save_value_head`` has left in a model's folder, if it has.
    Raises ``ModelError`` if they do not fit."""
    file = folder / f"{VALUE_HEAD}.safetensors"
    if not file.is_file():
        return
    try:
        stored = optional("safetensors.torch", "loading a model").load_file(file)
        head.load_state_dict({n.removeprefix(f"{VALUE_HEAD}."): p for n, p in stored.items()})
    except Exception as error:  # its reader and PyTorch have no common class of errors
        raise ModelError(
            f"{str(file)!r} does not fit the model ({error!r:.200}); remove it to begin with a new "
            "value head"
        ) from error


def save_beside(tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """Writes tensors that are no part of the model beside it, and an index that says which files
    are: without one vLLM loads all safetensors there are."""
    safetensors = optional("safetensors", "saving a model")
    own = {key: value.contiguous() for key, value in tensors.items()}
    with system_errors():
        save_file = optional("safetensors.torch", "saving a model").save_file
        save_file(own, folder / name, {"format": "pt"})
    _as_other_files(folder)
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        with safetensors.safe_open(str(whole), "pt") as opened:
            places = dict.fromkeys(opened.keys(), whole.name)
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _as_other_files(folder: Path) -> None:
    """Whoever may read the folder may read its weights: safetensors 0.8 writes a temporary file,
    which is its owner's alone, and renames it."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # a file system without permissions
            file.chmod(mode)


def why_no_hub() -> str | None:
    """Why the Hugging Face hub cannot be asked, or ``None`` if it answers.

    One request with a short timeout, through the hub client's own session (its endpoint, proxies
    and offline switch count). Without it a load without network spends 45 s in retries.
    """
    hub = optional("huggingface_hub", "the Hugging Face hub")
    # Its modules come into being when they are imported, by whoever that is.
    errors, constants = (
        optional(f"huggingface_hub.{name}", "the Hugging Face hub")
        for name in ("errors", "constants")
    )
    # Which HTTP client the session is differs by the hub's version (httpx, httpx2); the root of
    # its errors is what the hub derives its own from.
    client_errors = errors.HfHubHTTPError.__bases__
    try:
        # Any answer will do, an error status too: the load itself explains that one better.
        hub.get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (OSError, *client_errors) as error:  # offline mode is a ConnectionError
        return f"the hub at {constants.ENDPOINT} cannot be reached ({reason_of(error)})"
    return None
