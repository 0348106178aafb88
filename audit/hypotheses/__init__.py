"""Explanations of a mismatch between a log and a model, each scored against the log."""
