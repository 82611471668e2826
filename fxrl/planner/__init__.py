"""What each layer's backward gets: the fastest choices that fit the GPU and the host."""
