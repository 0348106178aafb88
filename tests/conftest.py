"""Set before anything loads torch."""

import os

# A barrier of several threads on a busy core spins until the others are scheduled; passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
