"""One numerical operation per file: equation, roundings, reference, autograd.Function, public function."""
