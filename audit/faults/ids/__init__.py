"""Faults that the ids of a log show, whatever its numbers are. No model is needed, and no torch is loaded."""
