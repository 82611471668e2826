"""Make ``idioms``, ``more_idioms`` and ``judge`` importable from the tests of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
