"""``python -m fxrl`` is the ``fxrl`` command."""

import sys

from fxrl.cli import main

sys.exit(main())
