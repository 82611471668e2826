"""What a run is made of, in a line each: questions, its rewards' code, models, tokenizer.

A resumed run compares them with those of its checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from fxrl.models import Sharded
from fxrl.models.lora import is_adapted
from fxrl.ops.checksum import checksum
from fxrl.rl.errors import CheckpointError
from fxrl.rl.types import Row, TokenRow


def of_rows(rows: Sequence[Row]) -> str:
    """Changes with any value of any row, and with their order."""
    digest = hashlib.sha256()
    for row in rows:
        try:
            text = json.dumps(row, sort_keys=True, default=_told)
        except TypeError:  # keys that are no texts
            text = _told(row)
        digest.update(text.encode() + b"\n")
    return f"{len(rows)} rows, {_short(digest.hexdigest())}"


def _told(value: Any) -> str:
    """What JSON does not know, without its address, which differs in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def of_tokens(rows: Sequence[TokenRow]) -> str:
    """Changes with any token, with what of them is learned from, and with the rows' order."""
    digest = hashlib.sha256()
    for row in rows:
        mask = row.per_token.get("completion_mask", ())
        for part in (row.prompt, row.completion, mask):
            digest.update(f"{len(part)} ".encode() + array("q", map(int, part)).tobytes())
    return f"{len(rows)} rows, {_short(digest.hexdigest())}"


def of_code(function: Callable[..., Any]) -> str | None:
    """Changes with the file of ``function`` and the files beside it that it uses; ``None`` for
    what has no Python source."""
    while isinstance(function, functools.partial):
        function = function.func
    named = inspect.isroutine(function) or inspect.isclass(function)
    target: Any = inspect.unwrap(function if named else type(function))
    try:
        home = Path(inspect.getsourcefile(target) or "")
    except TypeError:
        return None
    if not home.is_file():
        return None
    files = {home}
    for part in (target, *vars(target).values()):  # a function, or the methods of a class
        _add_used(getattr(part, "__globals__", {}), home.parent, files)
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(home.parent)} {len(content)} ".encode() + content)
    return f"{home.name} and {len(files) - 1} files it uses, {_short(digest.hexdigest())}"


def _add_used(names: Mapping[str, Any], folder: Path, files: set[Path]) -> None:
    """Adds the files under ``folder`` of the modules that ``names`` come from, and of theirs."""
    for value in list(names.values()):
        named = value if isinstance(value, FunctionType | type) else type(value)
        module = value if isinstance(value, ModuleType) else sys.modules.get(named.__module__)
        file = Path(getattr(module, "__file__", None) or "")
        if file not in files and file.suffix == ".py" and file.is_relative_to(folder):
            files.add(file)
            _add_used(vars(module), folder, files)


def of_models(
    model: nn.Module, tokenizer: Any, teacher: nn.Module | None, *, new: bool
) -> dict[str, str]:
    """Fingerprints of all models and the tokenizer, by name; of an adapter unless it is ``new``."""
    found = {"base model": of_weights(model), "tokenizer": of_tokenizer(tokenizer)}
    if is_adapted(model) and not new:
        found["adapter"] = of_tensors((n, p) for n, p in _weights(model) if p.requires_grad)
    return found if teacher is None else found | {"teacher": of_weights(teacher)}


def of_weights(model: nn.Module) -> str:
    """Changes with any bit of the weights that training starts from: the frozen ones beside an
    adapter, else all. Read on their device, so that large models do not cross over to the host."""
    frozen = any(not p.requires_grad for _, p in _weights(model))
    return of_tensors((name, p) for name, p in _weights(model) if not (frozen and p.requires_grad))


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights by name. One that is distributed over ranks is gathered, and freed when the next is
    asked for, so that the fingerprint does not depend on the number of ranks."""
    known: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, Sharded) and id(module.part) not in known:
            known.add(id(module.part))
            yield from ((f"{path}.{name}", tensor) for name, tensor in module.stored().items())
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) not in known and parameter.numel():  # an empty one tells a dtype
                known.add(id(parameter))
                yield name, parameter


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Changes with their names, and with any bit of them."""
    digest, count = hashlib.sha256(), 0
    for name, tensor in named:
        value, count = tensor.detach(), count + 1
        digest.update(f"{name} {value.dtype} {list(value.shape)} {checksum(value)}\n".encode())
    return f"{count} tensors, {_short(digest.hexdigest())}"


def of_tokenizer(tokenizer: Any) -> str:
    """Changes with the vocabulary and the chat template."""
    parts = [getattr(tokenizer, "chat_template", None), sorted(tokenizer.get_vocab().items())]
    return _short(hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def _short(digest: str) -> str:
    return f"SHA-256 {digest[:16]}"


def changes(saved: Mapping[str, Any], present: Mapping[str, str]) -> str:
    """What of ``present`` was something else, a line each."""
    changed = (
        f"{name}: was {saved.get(name)}; is {now}"
        for name, now in present.items()
        if saved.get(name) != now
    )
    return "\n  ".join(changed)


def check_unchanged(
    path: Path, saved: Mapping[str, Any], present: Mapping[str, str], *, accept: bool
) -> None:
    """Refuses changes in what both know, unless the user has said that they are meant."""
    both = {name: now for name, now in present.items() if name in saved}
    if (lines := changes(saved, both)) and not accept:
        raise CheckpointError(
            f"{path}: what the run is made of has changed since:\n  {lines}\n"
            "put it back, or go on with what there is by --accept-changes"
        )
