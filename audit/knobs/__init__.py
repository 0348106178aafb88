"""Knobs: a number at every operation of a model, fitted to a column of a log."""
