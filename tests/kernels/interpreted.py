"""Runs a file of cases under Triton's interpreter."""

import functools
import os
import subprocess
import sys
from pathlib import Path


def check_interpreted(cases: Path | str, *arguments: str) -> None:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "ignore", str(cases), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all agree" in done.stdout


def mend_interpreter():
    """Triton 3.6 makes a loop's bound of a one-element array, which numpy 2.4 refuses; and patches
    its language anew for every call inside a kernel, which is a third of the time."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend
    once = functools.cache(interpreter._patch_lang)

    def call(self, *args, **kwargs):
        once(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
