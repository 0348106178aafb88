"""The seams to other frameworks: recorders, exact trainers of TRL, environments.

A recorder writes logs that `zerokl audit` and `zerokl diff` read. It changes nothing of the run that it
records.
"""
