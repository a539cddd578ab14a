"""``python -m tests.mutations``."""

import sys

from tests.mutations.campaign import main

raise SystemExit(main(sys.argv[1:]))
