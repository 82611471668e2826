"""Device kernels. They replace an op's eager reference by the same function, faster.

NOTE [Why kernels attach by a call and not by import]
An import that changes what an operator runs cannot be undone or ordered. ``register`` is called by
whoever is about to run on the device; without it every op runs its reference, on any device.
"""

from __future__ import annotations

from importlib.util import find_spec


def register() -> bool:
    """Attach the CUDA kernels to fxrl's ops; calling it again changes nothing.

    Returns False, with every op left on its reference, where Triton is not installed.
    """
    if find_spec("triton") is None:
        return False
    from fxrl.kernels import dequantized, fp8
    from fxrl.kernels.linear_logprob import cuda as linear_logprob

    dequantized.register()
    fp8.register()
    linear_logprob.register()
    return True
