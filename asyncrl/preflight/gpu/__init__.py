"""`asyncrl doctor --gpu`: measures what a run on this machine's GPUs is made of, and judges each figure."""
