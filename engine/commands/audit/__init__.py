"""`zerokl audit`: how far a sampler and a trainer are apart, and at which operation they part."""
