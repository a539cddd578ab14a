"""``python -m featstore.cli``."""

import sys

from featstore.cli.main import main

sys.exit(main())
