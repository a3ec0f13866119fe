"""`python -m pdvsim` is `pdvsim`."""

import sys

from pdvsim.cli import main

sys.exit(main())
