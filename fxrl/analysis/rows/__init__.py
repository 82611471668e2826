"""Token independence: what of a graph can run row by row."""
