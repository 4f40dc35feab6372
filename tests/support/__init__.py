"""What tests share: contracts, stand-ins, tiny models, processes. No test imports another test."""

import asyncrl  # noqa: F401 - before anything imports transformers: it hides builds that transformers cannot import
