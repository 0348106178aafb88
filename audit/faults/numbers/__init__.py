"""Faults that the two columns of a log tell. Their files need no model, and load no torch."""
