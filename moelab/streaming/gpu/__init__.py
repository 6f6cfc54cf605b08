"""What only a CUDA GPU has: copies in its own order, experts in pinned memory of its host."""
