"""``python -m fxrl`` is the ``fxrl`` command."""

import sys
from pathlib import Path

import fxrl
from fxrl.cli import main

# `python -m` puts the working folder in front of what is installed.
if not sys.flags.safe_path and Path(fxrl.__file__).parents[1] != Path(sys.path[0]):
    del sys.path[0]
sys.exit(main())
