"""The command line as a process."""

import sys

ASYNCRL = [sys.executable, "-m", "asyncrl.cli.main"]
