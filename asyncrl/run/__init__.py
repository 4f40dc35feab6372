"""What a run is on disk: its directory, keys, checkpoints, starts."""
