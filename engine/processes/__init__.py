"""Processes beside the one that trains: their start, their end, and the memory they share."""
