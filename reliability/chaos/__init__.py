"""Faults on real processes, which are killed, stopped, cut off and rolled back: `python -m reliability.chaos
-h`."""
