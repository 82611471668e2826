"""Each step's difference between sampling and training log-probabilities, and when to worry.

The losses of ``fxrl.losses`` measure it from the log-probabilities they compute anyway. For any
other loss nothing else knows them, so a few thousand tokens of the step are scored for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fxrl.losses import FACTORIES
from fxrl.rl.types import Batch, Metrics
from fxrl.runtime import drift
from fxrl.runtime.drift import DriftMeter, Level

PROBE_TOKENS = 4096
NEVER_MEASURE = ("dpo", "sft")
"""fxrl's losses that are no policy losses."""
_KEY = "sampling/sampling_logp_difference"


def loss_measures(name: str) -> bool:
    """Whether the loss called ``name`` reports the difference itself."""
    return name in FACTORIES and name not in NEVER_MEASURE


def probe_rows(plan: Sequence[Sequence[int]], totals: Sequence[int]) -> tuple[int, ...]:
    """Rows of the micro-batch of the shortest ones, ``PROBE_TOKENS`` at most, at least one."""
    rows = plan[-1]
    widest = max(totals[row] for row in rows)
    return tuple(rows[: max(1, PROBE_TOKENS // widest)])


def measured(logps: Any, batch: Batch) -> Metrics:
    """The metrics of one scored batch, under TRL's names."""
    meter = DriftMeter()
    meter.add(logps, batch["rollout_logps"], batch["completion_mask"])
    found = meter.result()
    values = {} if found is None else found.metrics()
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class DriftWatch:
    """Tells of a drift when it becomes worse, and not at every step."""

    def __init__(self) -> None:
        self._told: Level = "ok"

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """What to say after a step, if anything.

        Args:
            record: the step's metrics.
        """
        mean = record.get(f"{_KEY}/mean")
        if mean is None:
            return None
        # The losses' ratios are cut by the correction, so only the difference is judged.
        order = ("ok", "high", "severe")
        level, told = drift.level(mean), self._told
        self._told = level
        return drift.warning(mean) if order.index(level) > order.index(told) else None
