"""A region's body: traced, cut, compiled, for all sizes alike."""
