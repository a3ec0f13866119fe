"""Triton kernels run in its interpreter here, on the CPU; it must be asked for before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
