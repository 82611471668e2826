"""Looking at a step: explain, verify, dump."""
