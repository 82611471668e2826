"""The doors to transformers, peft and the Hugging Face hub: imported late, quiet, asked once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fxrl.errors import FxrlError, optional


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


_USE_CACHE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def train_without_cache(model: Any) -> None:
    """Switches the KV cache off in the model's configuration, but not in what is saved of it."""
    _USE_CACHE.setdefault(model, model.config.use_cache)
    model.config.use_cache = False


def save_pretrained(model: Any, folder: Path) -> None:
    """The model's own ``save_pretrained``, without progress bars and as nobody trains it."""
    used_cache = _USE_CACHE.get(model)
    if used_cache is not None:
        model.config.use_cache = used_cache
    try:
        with no_progress_bars():
            model.save_pretrained(str(folder))
    finally:
        if used_cache is not None:
            model.config.use_cache = False


def why_no_hub() -> str | None:
    """Why the Hugging Face hub cannot be asked, or ``None`` if it answers.

    One request with a short timeout, through the hub client's own session (its endpoint, proxies
    and offline switch count). Without it a load without network spends 45 s in retries.
    """
    hub = optional("huggingface_hub", "the Hugging Face hub")
    # Which HTTP client the session is differs by the hub's version (httpx, httpx2); the root of
    # its errors is what the hub derives its own from.
    client_errors = hub.errors.HfHubHTTPError.__bases__
    try:
        # Any answer will do, an error status too: the load itself explains that one better.
        hub.get_session().head(hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (OSError, *client_errors) as error:  # offline mode is a ConnectionError
        reason = str(error).splitlines() or [type(error).__name__]
        return f"the hub at {hub.constants.ENDPOINT} cannot be reached ({reason[0][:120]})"
    return None
