"""Runs files of cases under Triton's interpreter: ``python interpreted.py FILE[,ARGUMENT] ...``."""

import functools
import json
import sys
from pathlib import Path

from tests.forked import run_forked

FOLDER = Path(__file__).parent


def mend_interpreter():
    """Triton 3.6 makes a loop's bound of a one-element array, which numpy 2.4 refuses; patches its
    language anew for every call inside a kernel, which is a third of the time; and multiplies the
    bits of bf16 numbers as integers."""
    import triton.language as tl
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
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view("uint16").astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    builder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)


if __name__ == "__main__":
    import fxrl.kernels.decode_attention
    import fxrl.kernels.dequantized
    import fxrl.kernels.hopper.head
    import fxrl.kernels.linear_logprob.cuda
    import fxrl.kernels.sample  # noqa: F401  # imported once, before the forks

    files = {given: given.split(",") for given in sys.argv[1:]}
    told = {given: run_forked(FOLDER / file, *more) for given, (file, *more) in files.items()}
    print(json.dumps(told))
