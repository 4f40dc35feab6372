"""Processes of a run: what starts what, with which adapters."""
