"""`examples/one_process.py` as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_process.py"


def load_example() -> ModuleType:
    """A fresh copy, whose settings a test may change."""
    spec = importlib.util.spec_from_file_location("one_process", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
