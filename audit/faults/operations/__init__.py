"""Faults of single operations, by equation: what a traced operation computes instead of the checkpoint's."""
