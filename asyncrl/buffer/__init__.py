"""The data plane: the distributed buffer and the store it lives in."""
