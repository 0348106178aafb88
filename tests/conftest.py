"""Set before anything loads torch."""

import os

from hypothesis import settings

# A barrier of several threads on a busy core spins until the others are scheduled; passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("zerokl", deadline=None)  # a busy machine fails no test
settings.load_profile("zerokl")
