"""Readers of rollout logs, one file for each framework that writes them; registry.py has the table."""
