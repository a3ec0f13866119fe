"""The programs that made the published PD-Verify tables, kept apart from pdvsim's own policies.

They exist to give those tables back from their mechanisms (`pdvsim reproduce`), and for nothing else.
"""

from typing import Literal

TableName = Literal["three-way", "poisson-30s", "model-comparison"]
