"""Recorders for other frameworks: they write logs that `zerokl audit` and `zerokl diff` read.

A recorder changes nothing of the run that it records.
"""
