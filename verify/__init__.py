"""Checks that know no engine: bitwise comparison, mismatch metrics, and the harness of the law's checks."""
