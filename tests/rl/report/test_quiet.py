"""What libraries say of themselves is no news of a run."""

import subprocess
import sys

SCRIPT = """
import sys
from fxrl.cli import main

for number, overrides in enumerate((
    ["model.gradient_checkpointing=true"],
    ["model.gradient_checkpointing=true", "model.lora=null", "loss.beta=0"],
    ["model.id=tiny:mixtral"],
)):
    quiet = ["optimize=false", "steps=1", "save_every=0", f"run_dir={number}", *overrides]
    if main(["train", sys.argv[1], *quiet]) != 0:
        raise SystemExit(f"failed: {overrides}")
"""


def test_a_run_says_nothing_on_stderr(config_file):
    """Adapters, all weights, experts; with checkpointing, and with every warning let through."""
    command = [sys.executable, "-W", "always::FutureWarning", "-c", SCRIPT, str(config_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "Warning" not in done.stdout
