"""Chains whose layers are all layers of their own, and whose weights have no gradient."""

from fxrl.planner.chain import Chain


def plain_chain(layers, *ends, numbers=(), gradients=()):
    """``ends`` as of ``Chain``, from ``base_bytes`` on."""
    layers = tuple(map(tuple, layers))
    numbers = tuple(numbers or range(len(layers)))
    return Chain(layers, numbers, tuple(gradients or (0,) * (len(layers) + 2)), *ends)
