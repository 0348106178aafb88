"""The figures of an audit, and the statistics on which it rests."""
