"""Reward functions and the processes that run them."""
