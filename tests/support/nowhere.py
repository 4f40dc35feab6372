"""A tracker and a staging without work."""

from typing import Any

from asyncrl.weights.base import UpdateOrder


class Nowhere:
    """Drops what it is told, and stages nothing."""

    def log(self, *_: Any, **__: Any) -> None: ...
    def samples(self, *_: Any) -> None: ...
    def close(self) -> None: ...

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        return order
