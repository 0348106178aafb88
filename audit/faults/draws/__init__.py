"""Faults that a model sees in where the drawn tokens lie in their distributions. No number need be wrong."""
