"""Code for CUDA GPUs alone, which copy in their own order and can use their host's memory."""
