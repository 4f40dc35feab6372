"""The release of this package. The build of the wheel reads it here."""

__version__ = "0.1.0"
