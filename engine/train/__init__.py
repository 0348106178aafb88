"""One training step, and what it reads and changes."""
