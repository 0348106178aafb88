"""`zerokl audit`: how far a sampler and a trainer are apart, and the operation at which they first differ."""
