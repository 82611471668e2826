"""The rollout side: generation, decode kernels, and the whole GRPO step beside TRL.

    fxrl bench rollout [PART] [the part's own options, such as --help]

    generate   fxrl's embedded engine beside Hugging Face generate; any machine
    kernels    the decode step's attention and sampling beside vLLM's and PyTorch's; a GPU
    step       a whole GRPO step: fxrl, TRL, vLLM alone; a GPU and vLLM
    standby    what vLLM gives back between rollouts, and how fast; a GPU and vLLM
    agreement  sampling log-probs beside the trainer's; vLLM, on a CPU too

Without PART: ``step`` where there is a GPU and vLLM, else ``generate``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

PARTS = {
    "generate": "bench.generate",
    "kernels": "bench.decode_kernels",
    "step": "bench.rl_step",
    "standby": "bench.standby",
    "agreement": "bench.agreement",
}
_NEEDS_GPU = {"kernels", "step", "standby"}
_NEEDS_VLLM = {"step", "standby", "agreement"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part in a process of its own.

    Returns:
        The part's exit code; 2 for a part that does not exist or lacks what it needs.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    named = bool(words) and not words[0].startswith("-")
    part = words.pop(0) if named else default_part()
    if part not in PARTS:
        return _refuse(f"no part {part!r}; there are {', '.join(PARTS)}")
    if not {"-h", "--help"} & set(words) and (reason := lacks(part)):
        return _refuse(f"{part} needs {reason}")
    if not named:
        print(f"fxrl bench rollout {part}", file=sys.stderr)
    return subprocess.run([sys.executable, "-m", PARTS[part], *words], check=False).returncode


def default_part() -> str:
    """The most that this machine can do."""
    return "generate" if lacks("step") else "step"


def lacks(part: str) -> str | None:
    """What this machine lacks for ``part``, and how to get it."""
    import torch

    if part in _NEEDS_GPU and not torch.cuda.is_available():
        return "a CUDA device, and there is none; `fxrl doctor` says what torch sees"
    if part in _NEEDS_VLLM and importlib.util.find_spec("vllm") is None:
        return "vLLM: pip install -e '.[vllm]'"
    return None


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
