"""What an audit concludes: the outcome, the faults, the likely cause, the notes."""
