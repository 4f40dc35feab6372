"""Prompts and the deterministic sample plan."""
