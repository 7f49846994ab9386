"""`python -m redraft`: the same as the command `redraft`."""

import sys

from redraft.cli import main

sys.exit(main())
