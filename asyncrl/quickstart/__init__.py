"""Makes the tiny model and the data of the quick start."""
