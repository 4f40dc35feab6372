"""In a tree with a mutant: print the first seed that fails, and why; exit status 0 when no seed fails."""

import sys

from .world import simulate


def main() -> int:
    for seed in range(1, int(sys.argv[1]) + 1):
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001 - whatever broke, it was noticed
            sys.stdout.write(f"{seed} {type(error).__name__}: {str(error).splitlines()[0]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
