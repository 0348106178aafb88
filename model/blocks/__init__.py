"""What layers are made of. A block holds its weights, its operations and its forward in one file."""
