"""The checks of `asyncrl doctor`."""
