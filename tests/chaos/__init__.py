"""Faults on real processes: store, generators and learner killed, stopped, cut off, rolled back. `python -m tests.chaos --help`."""
