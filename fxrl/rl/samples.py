"""The few completions of a step that are shown and written."""

from __future__ import annotations

import math
from typing import Any

from fxrl.rl.types import Rollout


def sample_completions(rollout: Rollout, wanted: int) -> list[dict[str, Any]]:
    """``wanted`` completions, or all, spread over the step's prompts."""
    total = len(rollout.texts)
    count = min(wanted, total)
    picked = [i * total // count for i in range(count)]
    return [
        {
            "question": _last_text(rollout.prompts[i]),
            "prompt": rollout.prompts[i],
            "completion": rollout.texts[i],
            "reward": rollout.rewards[i] if math.isfinite(rollout.rewards[i]) else None,
            "advantage": rollout.advantages[i],
            **{f"rewards/{name}": v[i] for name, v in rollout.by_function.items()},
        }
        for i in picked
    ]


def _last_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
