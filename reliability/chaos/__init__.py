"""Faults on real processes: killed, stopped, cut off and rolled back. `python -m reliability.chaos -h`."""
