"""Runs files of cases under Triton's interpreter: ``python interpreted.py FILE[,ARGUMENT] ...``."""

import functools
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

FOLDER = Path(__file__).parent


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


def run_forked(file, *arguments):
    """The exit code of a file that is run as a script, and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.argv = [file, *arguments]
            code = 1
            try:
                runpy.run_path(str(FOLDER / file), run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()


if __name__ == "__main__":
    import fxrl.kernels.decode_attention
    import fxrl.kernels.dequantized
    import fxrl.kernels.hopper.head
    import fxrl.kernels.linear_logprob.cuda
    import fxrl.kernels.sample  # noqa: F401  # imported once, before the forks

    print(json.dumps({given: run_forked(*given.split(",")) for given in sys.argv[1:]}))
