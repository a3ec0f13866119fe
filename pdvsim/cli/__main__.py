"""`python -m pdvsim.cli` is `pdvsim`."""

import sys

from pdvsim.cli import main

sys.exit(main())
