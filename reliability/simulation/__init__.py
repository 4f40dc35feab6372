"""A deterministic simulation of the store protocol."""
