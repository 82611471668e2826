"""The head's variants: fxrl, PyTorch, and the peers that are installed, each by its own name.

An adapter is a function of the mode that imports its package and returns a function
``(hidden [N, H], weight [V, H], target [N]) -> (logprob [N], entropy [N] or None)``. What a peer
cannot do is an ``UnsupportedError``; it becomes a row, like the error of a missing package.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bench.lib.head_case import Mode

Head: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class UnsupportedError(Exception):
    """The peer has no such option."""


@dataclass(frozen=True)
class Variant:
    """An implementation of the head.

    Attributes:
        title: what the table says.
        package: the distribution whose version the table gives.
        make: mode -> head.
    """

    title: str
    package: str
    make: Callable[[Mode], Head]

    @property
    def version(self) -> str | None:
        """The package's version, None where it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def _fxrl(mode: Mode, keep: bool = False) -> Head:
    from fxrl import kernels
    from fxrl.ops.linear_logprob import linear_logprob

    kernels.register()
    outputs = ("logprob", "entropy") if mode.entropy else ("logprob",)
    differentiated = outputs if mode.entropy_grad else ("logprob",)

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        options = {"outputs": outputs, "grad_outputs": differentiated, "softcap": mode.softcap}
        made = linear_logprob(hidden, weight, target, keep_exponentials=keep, **options)
        return made.logprob, made.entropy if mode.entropy else None

    return head


def _eager(mode: Mode) -> Head:
    """As model code writes it: logits in the model's dtype, then float32."""

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = (hidden @ weight.t()).float()
        if mode.softcap:
            logits = torch.tanh(logits / mode.softcap) * mode.softcap
        logps = torch.log_softmax(logits, -1)
        logprob = logps.gather(-1, target[:, None]).squeeze(-1)
        if not mode.entropy:
            return logprob, None
        source = logps if mode.entropy_grad else logps.detach()
        return logprob, -(source.exp() * source).sum(-1)

    return head


def _compile(mode: Mode) -> Head:
    torch._dynamo.reset()  # each row compiles anew: no limit on recompilations is ever reached
    return torch.compile(_eager(mode), dynamic=False)


def _trl(mode: Mode) -> Head:
    """What TRL's GRPOTrainer calls, with its vocabulary chunk of 32768."""
    from trl.kernels import ChunkedLogProbFunction

    outputs = ("entropy",) if mode.entropy else ()

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        logprob, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, target, 1.0, 32768, mode.softcap or None, 1.0, outputs
        )
        return logprob, entropy

    return head


def _liger(mode: Mode) -> Head:
    """What LigerFusedLinearGRPOLoss takes its log-probs from, with its default chunk."""
    _refuse(mode, "the selective log-prob", softcap=True, entropy=True)
    from liger_kernel.chunked_loss import fused_linear_ppo

    function = fused_linear_ppo._ChunkedSelectiveLogProbFunction
    chunk = fused_linear_ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    return lambda hidden, weight, target: (
        function.apply(hidden, weight, target, None, 1.0, chunk),
        None,
    )


def _liger_cute(mode: Mode) -> Head:
    """Per-token NLL and entropy; on Hopper a CuTe kernel, which needs nvidia-cutlass-dsl."""
    _refuse(mode, "the scaled cross entropy", softcap=True)
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    # Named, because the front door would run its PyTorch fall-back without a word elsewhere.
    function: Any = module._load_sm90_function()

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        made = function.apply(hidden, weight, target, 1.0, -100, 1, mode.entropy)
        return (-made[0], made[1]) if mode.entropy else (-made, None)

    return head


def _cce(filter_eps: str | None) -> Callable[[Mode], Head]:
    """``filter_eps`` "high" is the default: probabilities below it get no gradient."""

    def make(mode: Mode) -> Head:
        _refuse(mode, "linear_cross_entropy", entropy=True)
        from cut_cross_entropy import linear_cross_entropy

        return lambda hidden, weight, target: (
            -linear_cross_entropy(
                hidden,
                weight,
                target,
                softcap=mode.softcap or None,
                reduction="none",
                filter_eps=filter_eps,
            ),
            None,
        )

    return make


def _verl(mode: Mode) -> Head:
    """Always with entropy; frozen or not, its backward makes dW."""
    _refuse(mode, "verl's kernel", softcap=True)
    linear_cross_entropy = _module_of_verl(
        "verl.utils.kernel.linear_cross_entropy"
    ).LinearCrossEntropy.apply

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        logprob, entropy = linear_cross_entropy(hidden, weight, target, 1.0, "none")
        return logprob, entropy if mode.entropy else None

    return head


def _unsloth(mode: Mode) -> Head:
    """As installed: unsloth_zoo wants unsloth imported first, which patches PyTorch for good."""
    import unsloth  # noqa: F401
    from unsloth_zoo.fused_losses.fused_linear import fused_linear_logprobs

    options = {"return_entropy": True, "entropy_requires_grad": mode.entropy_grad}

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        made = fused_linear_logprobs(
            hidden,
            weight,
            target,
            logit_softcapping=mode.softcap,
            **(options if mode.entropy else {}),
        )
        first, *rest = made if isinstance(made, tuple | list) else (made,)
        return first, rest[0] if mode.entropy else None

    return head


def _module_of_verl(name: str) -> ModuleType:
    """The module from the installed verl, without what its packages import besides.

    NOTE [Why not by import alone]
    ``import verl`` needs ray, tensordict and more, a whole cluster's worth, for a kernel that needs
    PyTorch and Triton. Where they are missing, ``verl`` and ``verl.utils`` are entered into
    ``sys.modules`` as bare packages with verl's own folders; the kernel's modules are verl's files.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "verl":
            raise
    for package in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        del sys.modules[package]  # what the failed import left behind
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = Path(found.submodule_search_locations[0])
    for package in ("verl", "verl.utils"):
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(root.parent.joinpath(*package.split(".")))]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(name)


def _refuse(mode: Mode, what: str, *, softcap: bool = False, entropy: bool = False) -> None:
    if softcap and mode.softcap:
        raise UnsupportedError(f"{what} has no softcap")
    if entropy and mode.entropy:
        raise UnsupportedError(f"{what} returns no entropy")


# unsloth_zoo last: what its import changes must not reach the others' first rows.
VARIANTS: dict[str, Variant] = {
    "fxrl": Variant("fxrl", "fxrl", _fxrl),
    "fxrl-kept": Variant("fxrl, exponentials kept", "fxrl", partial(_fxrl, keep=True)),
    "eager": Variant("eager", "torch", _eager),
    "compile": Variant("torch.compile", "torch", _compile),
    "trl": Variant("TRL ChunkedLogProbFunction", "trl", _trl),
    "liger": Variant("Liger selective log-prob", "liger-kernel", _liger),
    "liger-cute": Variant("Liger CuTe scaled CE", "liger-kernel", _liger_cute),
    "cce": Variant("CCE", "cut-cross-entropy", _cce("high")),
    "cce-exact": Variant("CCE, no filter", "cut-cross-entropy", _cce(None)),
    "verl": Variant("verl kernel", "verl", _verl),
    "unsloth": Variant("unsloth_zoo", "unsloth_zoo", _unsloth),
}
