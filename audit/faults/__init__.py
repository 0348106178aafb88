"""The faults of a log, a file each: how it is planted, what it predicts or shows, and the words for it."""
