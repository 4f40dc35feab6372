"""Metrics and samples: writing them, reading them back, and showing them on a terminal."""
