"""What the commands do to a run: up, down, join, scale, look."""
