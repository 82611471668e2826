"""Make ``loss_reference`` and ``loss_models`` importable from the tests of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
