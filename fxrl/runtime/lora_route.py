"""How a LoRA policy gets into the engine: folded into its weights, into its LoRA slots, or copied.

    fold    W + scaling * B A in the shared weights for the rollout, then restored. Costs some
            passes over the folded bytes per rollout and nothing per decode step.
    slots   A and B into vLLM's adapter slots. Next to nothing per rollout, but vLLM's LoRA kernels
            run in every layer of every decode step.
    copy    merged weights written into the engine's own copy. For engines that share nothing.

NOTE [Why a model and not a rule]
Which of fold and slots is faster depends on how many steps a rollout decodes: at Qwen3-1.7B the
kernels cost 1.2 ms a step and a fold 15 ms a rollout, so folding pays after a dozen steps, and a
70B model with its weights' backup on the host needs hundreds. The start values below are
measured on one H200 (vLLM 0.25.1, Qwen3-1.7B, rank 32, CUDA graphs); ``observe`` replaces them by
what the engine at hand takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from fxrl.runtime.engine import EngineError

Kind = Literal["fold", "slots", "copy"]


class RouteError(EngineError):
    """The LoRA route that was asked for is not possible here, or none is."""


@dataclass(frozen=True, slots=True)
class Route:
    """The choice and why; ``str(reason)`` is meant for a person."""

    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What engine and model can do; each ``no_...`` is the reason why not, or empty.

    Attributes:
        no_fold: e.g. weights that are not shared or quantized, tensor parallelism above 1, an
            adapter that is not plain LoRA (the ``AdapterError``'s text), a tied weight.
        no_slots: e.g. the engine was built without LoRA, or the rank is above its maximum.
        no_copy: e.g. the weights are shared, so that a copy would overwrite the trainer's.
        folded_bytes: size of the weights that the adapter changes.
        free_device_bytes: left on the GPU beside the KV cache; ``None`` is no limit.
        free_host_bytes: that may be pinned; ``None`` is no limit.
    """

    no_fold: str = ""
    no_slots: str = ""
    no_copy: str = ""
    folded_bytes: int = 0
    free_device_bytes: int | None = None
    free_host_bytes: int | None = None


@dataclass
class CostModel:
    """Seconds that each route adds to a rollout.

    Attributes:
        device_bandwidth: bytes a second, one direction of a copy counted once.
        host_bandwidth: bytes a second, pinned host to device.
        step_overhead_s: what vLLM's LoRA kernels add to one decode step, by running sequences.
        slot_sync_s: writing the slots.
        fold_fixed_s: launches and the synchronisations of fold and restore.
    """

    device_bandwidth: float = 3.5e12
    host_bandwidth: float = 50e9
    step_overhead_s: dict[int, float] = field(default_factory=lambda: {32: 1.24e-3, 128: 1.8e-3})
    slot_sync_s: float = 7e-3
    fold_fixed_s: float = 8e-3
    _seen: dict[str, float] = field(default_factory=dict)

    def fold_s(self, folded_bytes: int, on_device: bool) -> float:
        """Fold and restore of one rollout."""
        if (seen := self._seen.get("fold_device" if on_device else "fold_host")) is not None:
            return seen
        # checksum, fold (read, write), restore's write, checksum; the backup's read and write too
        passes = 5.0 + (3.0 if on_device else 1.0)
        from_host = 0.0 if on_device else folded_bytes / self.host_bandwidth
        return self.fold_fixed_s + passes * folded_bytes / self.device_bandwidth + from_host

    def slots_s(self, decode_steps: float, num_sequences: int) -> float:
        """Slot write and the kernels of all decode steps of one rollout."""
        sync = self._seen.get("slots", self.slot_sync_s)
        return sync + decode_steps * self._overhead(num_sequences)

    def observe(self, kind: str, seconds: float) -> None:
        """Takes a measured time in; the first replaces the start value, later ones average.

        Args:
            kind: ``"fold_device"`` or ``"fold_host"`` (fold and restore together), ``"slots"``
                (the slot write), ``"step_fold"`` or ``"step_slots"`` (one decode step at about the
                usual number of sequences; with both known their difference is the overhead).
            seconds: measured.
        """
        known = ("fold_device", "fold_host", "slots", "step_fold", "step_slots")
        if kind not in known:
            raise RouteError(f"lora route: observed kind {kind!r} is unknown; use one of {known}")
        before = self._seen.get(kind)
        self._seen[kind] = seconds if before is None else 0.8 * before + 0.2 * seconds

    def _overhead(self, num_sequences: int) -> float:
        if {"step_fold", "step_slots"} <= self._seen.keys():
            return max(0.0, self._seen["step_slots"] - self._seen["step_fold"])
        return _interpolate(self.step_overhead_s, num_sequences)


def choose(
    capabilities: Capabilities,
    *,
    decode_steps: float = 1024.0,
    num_sequences: int = 32,
    costs: CostModel | None = None,
    force: Kind | None = None,
) -> Route:
    """The cheapest route that is possible.

    Args:
        capabilities: what is possible here.
        decode_steps: expected per rollout, about the longest completion.
        num_sequences: that decode at the same time.
        costs: measured costs; ``None`` takes the start values.
        force: the user's choice.

    Raises:
        RouteError: ``force`` names an impossible route, or none is possible; with the reasons.
    """
    costs = costs or CostModel()
    impossible = _impossible(capabilities)
    if force is not None:
        if force not in get_args(Kind):
            raise RouteError(f"lora route {force!r} is unknown; use one of {get_args(Kind)}")
        if why := impossible[force]:
            others = [kind for kind in get_args(Kind) if not impossible[kind]]
            raise RouteError(
                f"lora route {force!r} is not possible here: {why}; "
                + (f"possible: {', '.join(others)}" if others else "nor is any other")
            )
        return Route(force, "asked for")
    if not impossible["fold"] and not impossible["slots"]:
        return _cheaper(capabilities, costs, decode_steps, num_sequences)
    for kind, other in (("fold", "slots"), ("slots", "fold"), ("copy", "fold")):
        if not impossible[kind]:
            return Route(kind, f"{other}: {impossible[other]}")  # type: ignore[arg-type]
    raise RouteError(
        "lora: no way to give the adapter to the engine; "
        + "; ".join(f"{kind}: {why}" for kind, why in impossible.items())
    )


def backup_on_device(capabilities: Capabilities) -> bool:
    """Whether the backup of the folded weights fits on the GPU during the rollout."""
    free = capabilities.free_device_bytes
    return free is None or free >= capabilities.folded_bytes


def _impossible(capabilities: Capabilities) -> Mapping[str, str]:
    no_fold = capabilities.no_fold
    host = capabilities.free_host_bytes
    fits_host = host is None or host >= capabilities.folded_bytes
    if not no_fold and not backup_on_device(capabilities) and not fits_host:
        no_fold = (
            f"a backup of {capabilities.folded_bytes / 2**30:.2f} GiB fits neither on the GPU "
            f"({(capabilities.free_device_bytes or 0) / 2**30:.2f} GiB free) nor in host memory "
            f"({(host or 0) / 2**30:.2f} GiB free)"
        )
    return {"fold": no_fold, "slots": capabilities.no_slots, "copy": capabilities.no_copy}


def _cheaper(
    capabilities: Capabilities, costs: CostModel, decode_steps: float, num_sequences: int
) -> Route:
    on_device = backup_on_device(capabilities)
    fold = costs.fold_s(capabilities.folded_bytes, on_device)
    slots = costs.slots_s(decode_steps, num_sequences)
    where = "GPU" if on_device else "host"
    return Route(
        "fold" if fold <= slots else "slots",
        f"a rollout of {decode_steps:.0f} steps: fold and restore {fold * 1e3:.1f} ms (backup on "
        f"the {where}), slots with vLLM's LoRA kernels {slots * 1e3:.1f} ms",
    )


def _interpolate(points: Mapping[int, float], at: int) -> float:
    """Linear between the nearest two points, constant beyond them."""
    known = sorted(points.items())
    below = [point for point in known if point[0] <= at]
    above = [point for point in known if point[0] >= at]
    if not below or not above:
        return (below or above)[-1 if below else 0][1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
