"""One host: its processes and their progress, its GPUs, and which process gets which of them."""
