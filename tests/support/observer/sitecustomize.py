"""On PYTHONPATH, note who unpickles in every Python process of a run: a JSON line for each asking module."""

import json
import os
import sys
from types import FrameType

PATH = os.environ.get("NOTE_UNPICKLING_IN", "")
MACHINERY = ("pickle", "_compat_pickle", "copyreg")
seen = set()


def note(event, arguments):
    if event != "pickle.find_class":
        return
    asking: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (module := str(frame.f_globals.get("__name__"))) not in MACHINERY and module not in asking[-1:]:
            asking.append(module)
        frame = frame.f_back
    if asking and asking[0] not in seen:
        seen.add(asking[0])
        line = json.dumps(
            {"pid": os.getpid(), "argv": sys.orig_argv, "asking": asking, "for": list(map(str, arguments))}
        )
        with open(PATH, "a") as file:
            file.write(line + "\n")


if PATH:
    sys.addaudithook(note)
