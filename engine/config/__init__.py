"""The settings of a run: sections, presets, and the rules by which they go together."""
