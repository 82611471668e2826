"""What a run says of its steps, read back."""

import json
from pathlib import Path


def numbers(run_dir, *further):
    """The lines of ``metrics.jsonl``, without what measures time.

    Args:
        further: parts of names that are left out as well.
    """
    lines = [json.loads(text) for text in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    dropped = ("time", "per_s", *further)
    return [{k: v for k, v in e.items() if not any(part in k for part in dropped)} for e in lines]
