"""Environments of other libraries as tasks, which are named as module:object (docs/environments.md)."""
