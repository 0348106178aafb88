"""Faults that rewards and advantages of a log show (hypotheses/signal_checks.py)."""
