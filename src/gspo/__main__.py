"""``python -m gspo`` is ``gspo``."""

import sys

from gspo.cli.main import main

sys.exit(main())
