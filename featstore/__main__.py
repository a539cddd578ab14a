"""``python -m featstore``: the command line."""

import sys

from featstore.cli.main import main

sys.exit(main())
