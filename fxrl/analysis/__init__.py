"""What a graph is, found without changing it."""
