"""Processes of a run: what starts what, and which parts a process opens in which order."""
