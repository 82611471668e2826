"""From a user's function to one lowered graph."""
