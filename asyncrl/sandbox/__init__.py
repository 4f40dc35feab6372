"""Sandboxes: reward workers and programs that a model wrote, without the network, secrets or other files."""
