"""Checks that know no engine: bits, mismatch metrics, the law, traces, the run ledger, compiled kernels."""
