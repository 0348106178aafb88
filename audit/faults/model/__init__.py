"""Faults that a model tells: it computes the numbers that the log would hold."""
