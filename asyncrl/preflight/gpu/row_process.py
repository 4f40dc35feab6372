"""The process of one row: `python -m asyncrl.preflight.gpu.row_process NAME MODULE:FUNCTION DIRECTORY`.

The function gets the `Place` and yields figures. Each is on disk before the next one is measured.
"""

import os
import pkgutil
import sys
from pathlib import Path

from asyncrl.hosting.processes import die_with_parent, die_with_spawner
from asyncrl.preflight.gpu.figures import Place, append


def main() -> None:
    """Measure a row."""
    name, target, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    die_with_parent()
    for figure in pkgutil.resolve_name(target)(Place.read(directory)):
        append(directory / f"{name}.jsonl", figure)
    # What a library's threads or children still do must not keep the row.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
# For the engine's processes, as in a generator.
elif __name__ == "__mp_main__":
    die_with_spawner()
