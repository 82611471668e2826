"""The optimizer, whose states the ranks may share out: ZeRO's first stage (arXiv 1910.02054).

Each parameter has one rank that keeps its states and updates it; then it sends the new values to
the others. That is ``torch.distributed.optim.ZeroRedundancyOptimizer``. Gradients and weights stay
whole on every rank, so an update does what it does on one rank, to the bit.

Two things are done around it. It sends as soon as its rank is done, so its own step ends by a
meeting (``fxrl.distributed``, NOTE [Where ranks wait]). And its ``consolidate_state_dict`` and
``load_state_dict`` hold every rank's states in each GPU's memory: states are read from and loaded
into ``local_optimizer``, the plain one over a rank's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.distributed import Ranks
from fxrl.rl.config.named import make_optimizer
from fxrl.rl.config.tables import OptimConfig


def build_optimizer(
    config: OptimConfig, parameters: Iterable[nn.Parameter], ranks: Ranks | None = None
) -> torch.optim.Optimizer:
    """The optimizer over the trainable ones of ``parameters``; ``ranks``, if there are several,
    share out its states where these parameters are of one dtype and device. Raises ``ConfigError``
    if it refuses its keywords."""
    trained = [p for p in parameters if p.requires_grad]
    options = {"lr": config.lr, **config.options}
    kinds = {(p.dtype, p.device) for p in trained}
    if ranks is None or ranks.size == 1 or len(kinds) > 1:
        return make_optimizer(config.name, trained, options)
    # Its module compiles old functional optimizers, which takes a while and warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded: Any = make_optimizer(config.name, trained, options, ZeroRedundancyOptimizer)
    sharded.optim.register_step_post_hook(lambda *_: ranks.meet())
    return sharded  # type: ignore[no-any-return]


def local_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """What updates this rank's parameters: of a sharded optimizer its own part."""
    return getattr(optimizer, "optim", optimizer)  # type: ignore[no-any-return]


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """What has a name, such as a parameter's states, with tensors in host memory."""
    return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values.items()}


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's states with tensors of their own: those of a checkpoint may lie in its file."""
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}
