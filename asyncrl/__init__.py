"""Reinforcement learning of language models that never waits."""

__version__ = "0.1.0"
