"""``python -m featstore.cli``."""

import sys

from featstore.cli import main

sys.exit(main())
