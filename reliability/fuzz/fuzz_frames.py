"""Coverage-guided fuzzing of what the learner decodes. Not part of the test suite: it runs as long as you let
it.

    pip install atheris
    python -m reliability.fuzz.fuzz_frames -max_total_time=900 -rss_limit_mb=1024

Every argument is libFuzzer's. It stops at the first exception that is no WireError and leaves the input in
`crash-*`.
"""

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["asyncrl.wire", "asyncrl.types"]):
    from reliability.fuzz import frame_cases

SEEN = frame_cases.Seen()


def main() -> None:
    """Fuzz from the frozen frames."""
    with tempfile.TemporaryDirectory() as corpus:
        for number, case in enumerate(frame_cases.corpus()):
            (Path(corpus) / str(number)).write_bytes(case)
        atheris.Setup(
            [*sys.argv, corpus, "-max_len=4096"],
            lambda case: frame_cases.check(case, SEEN),
            custom_mutator=_mutate,
        )
        atheris.Fuzz()


def _mutate(case: bytes, max_bytes: int, seed: int) -> bytes:
    rng = random.Random(seed)
    changed = atheris.Mutate(case, max_bytes) if rng.random() < 0.5 else frame_cases.mutate(case, rng)
    return bytes(changed[:max_bytes])


if __name__ == "__main__":
    main()
