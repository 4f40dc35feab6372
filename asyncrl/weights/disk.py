"""A version of the weights as safetensors files: slower than any group, but it needs nobody at the other end.

    <root>/v<version>/model-00001-of-00002.safetensors ...    one file per bucket, Hugging Face names

Several senders may write the same version at once. What one of them finished before it was killed is not written
again, and the directory appears under its name only when all files are there.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from asyncrl.weights.layout import Layout

KEPT_VERSIONS = 2


def write_version(root: Path, version: int, buffer: Tensor, layout: Layout) -> Path:
    """Write `buffer` and return its directory; at once if it is there. Older versions than the newest two are deleted."""
    final, partial = root / f"v{version}", root / f"partial-v{version}"
    if not final.is_dir():
        partial.mkdir(parents=True, exist_ok=True)
        # Another sender may finish, and rename, the same directory in the meantime.
        with _unless_exists(final):
            for position in range(len(layout.buckets)):
                _write_bucket(partial, position, buffer, layout)
            os.rename(partial, final)
    _delete_old(root)
    return final


def _write_bucket(directory: Path, position: int, buffer: Tensor, layout: Layout) -> None:
    bucket = layout.buckets[position]
    path = directory / f"model-{position + 1:05d}-of-{len(layout.buckets):05d}.safetensors"
    if path.exists():
        return
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    tensors = {layout.specs[index].name: layout.view(buffer, index) for index in range(bucket.first, bucket.end)}
    save_file(tensors, unfinished)
    os.rename(unfinished, path)


@contextlib.contextmanager
def _unless_exists(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        if not final.is_dir():
            raise


def _delete_old(root: Path) -> None:
    versions = {directory: int(directory.name.rpartition("v")[2]) for directory in root.iterdir()}
    for directory in sorted(versions, key=lambda each: versions[each])[:-KEPT_VERSIONS]:
        shutil.rmtree(directory, ignore_errors=True)  # another sender may be deleting it too
