"""Shared by all tests. Being here also makes the helper modules of this directory importable."""

from hypothesis import settings

settings.register_profile("asyncrl", deadline=None)  # other work on the machine is no failure
settings.load_profile("asyncrl")
