"""Whether two things are the same: verify, replay, diff, attest, and what they compare."""
