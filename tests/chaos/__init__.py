"""Faults on real processes: store, generators, learner killed, stopped, cut off, rolled back. See `python -m tests.chaos -h`."""
