"""What tests share: contracts, stand-ins, tiny models, processes. No test imports another test."""
