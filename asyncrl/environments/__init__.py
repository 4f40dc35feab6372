"""Environments: what the model talks to between its answers, in processes that can be killed."""
