"""Environments of other libraries. Each module runs in the environment's Python, where its library is."""
