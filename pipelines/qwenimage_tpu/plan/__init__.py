"""Ask ahead of time: does the transformer fit a slice of TPUs, how long does an image take, at what price."""
