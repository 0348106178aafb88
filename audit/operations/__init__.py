"""Where two engines part, and why: one sequence, operation by operation."""
