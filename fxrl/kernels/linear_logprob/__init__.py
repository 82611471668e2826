"""The loss head's ops on a GPU: ``cuda`` chooses a route and launches, ``tile`` has the kernels."""
