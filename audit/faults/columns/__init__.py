"""Faults that columns show without a model (hypotheses/value_checks.py, figures/drawn_from.py)."""
