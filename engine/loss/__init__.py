"""The policy-gradient loss, its presets, advantages and reward shaping."""
