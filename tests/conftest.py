"""Property tests draw the same examples on every machine: a failure is one to look into, never a matter of luck."""

from hypothesis import settings

settings.register_profile("pdvsim", derandomize=True, deadline=None, database=None)
settings.load_profile("pdvsim")
