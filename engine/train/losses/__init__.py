"""The policy-gradient loss, advantages and reward shaping."""
