"""What `asyncrl doctor` finds out."""
