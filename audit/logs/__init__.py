"""Logs of rollouts: read for an audit, compared with each other, converted."""
