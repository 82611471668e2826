"""What the benchmarks share; nothing here runs by itself."""
