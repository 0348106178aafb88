"""The terminal: its console, a run's progress, Ctrl-C."""
