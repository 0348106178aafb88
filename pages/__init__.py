"""Pages for people: one template, one stylesheet and one library of charts. They know plain values only."""
