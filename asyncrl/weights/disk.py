"""A version of the weights as safetensors files: slower than a transfer group, but it needs no connection.

    <root>/v<version>/model-00001-of-00002.safetensors ...    one file per bucket, Hugging Face names

Several senders may write the same version concurrently. Files that one of them finished before it was killed
are not written again. The directory gets its final name only when all files are complete.
"""

import os
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from asyncrl.weights.layout import Layout

KEPT_VERSIONS = 2


def write_version(root: Path, version: int, buffer: Tensor, layout: Layout) -> Path:
    """Write `buffer` unless it is there, and return its directory. Deletes all but the newest two
    versions."""
    final, partial = root / f"v{version}", root / f"partial-v{version}"
    if not final.is_dir():
        partial.mkdir(parents=True, exist_ok=True)
        try:
            for position, bucket in enumerate(layout.buckets, start=1):
                path = partial / f"model-{position:05d}-of-{len(layout.buckets):05d}.safetensors"
                if path.exists():
                    continue
                unfinished = path.with_suffix(f".{os.getpid()}.tmp")
                save_file(
                    {layout.specs[i].name: layout.view(buffer, i) for i in range(bucket.first, bucket.end)},
                    unfinished,
                )
                os.rename(unfinished, path)
            os.rename(partial, final)
        except OSError:
            # Else another sender has finished, and renamed, the same directory meanwhile.
            if not final.is_dir():
                raise
    versions = {directory: int(directory.name.rpartition("v")[2]) for directory in root.iterdir()}
    for directory in sorted(versions, key=lambda each: versions[each])[:-KEPT_VERSIONS]:
        shutil.rmtree(directory, ignore_errors=True)  # another sender may be deleting it too
    return final
