"""What the simulation reports."""


class Violation(Exception):
    """Something happened that must never happen."""
