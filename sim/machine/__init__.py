"""What policies run on: the clock, devices, lanes and the KV cache."""
