"""The control plane: membership, versions, orders."""
