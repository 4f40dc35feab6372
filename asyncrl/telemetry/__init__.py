"""Metrics, samples, dashboard."""
