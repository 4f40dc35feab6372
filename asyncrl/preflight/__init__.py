"""Checks before a run: the machine, the config, the resources it will need, and its reward functions. Starts
no run."""
