"""Files of learner and store: truncated, emptied, a bit flipped, or gone, with their process alive or not."""

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.errors import CheckpointError
from asyncrl.run.checkpoint import NEWEST, CheckpointStore
from asyncrl.run.manifest import MANIFEST, STATE

from .faults import note
from .lineage import FILE
from .roles import KEEP, KEY, step_record
from .world import World


def truncated(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def emptied(path: Path, draw: random.Random) -> None:
    os.truncate(path, 0)


def flipped(path: Path, draw: random.Random) -> None:
    """In place, as a disk does it: who has the file open sees it."""
    if size := path.stat().st_size:
        place = draw.randrange(size)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def missing(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES: Mapping[str, Callable[[Path, random.Random], None]] = {
    "truncated": truncated,
    "emptied": emptied,
    "bit flipped": flipped,
    "missing": missing,
}
CHECKPOINT = (MANIFEST, STATE, FILE)
LEARNER = (*CHECKPOINT, NEWEST, "step under way", "learner's lock")
STORE = ("base of the log", "log", "manifest of the log")
_PATTERNS = dict(zip(STORE, ("*.base.*", "*.incr.aof", "*.manifest"), strict=True))


def damage_file(name: str, world: World, draw: random.Random) -> None:
    """One of them; its process is alive, and stays so or dies a moment later, or dies before."""
    process, how = "store" if name in STORE else "learner", draw.choice(list(DAMAGES))
    life = draw.choice(["alive", "dies after", "dies before"])
    if life == "dies before":
        _kill(world, process)
    path = _file_of(name, world, draw)
    try:
        if path is None:
            return
        DAMAGES[how](path, draw)
        note(world, f"file: {name} {how}")
    except FileNotFoundError:  # written anew, or pruned, just now
        return
    finally:
        if life == "dies after":
            _kill(world, process)
        if process == "store" and not world.server.is_running:
            world.revive_store()


def _kill(world: World, process: str) -> None:
    if process == "store":
        world.server.kill()
    else:
        world.kill("learner")


def _file_of(name: str, world: World, draw: random.Random) -> Path | None:
    """None when there is none, or when it is of the last checkpoint that verifies, which a run needs."""
    if name in STORE:
        found = sorted((world.directory / "store").rglob(_PATTERNS[name]))
    elif name in CHECKPOINT:
        whole = _whole(world)
        found = [draw.choice(whole[-KEEP:]) / name] if len(whole) >= KEEP else []
    else:
        paths = {NEWEST: world.checkpoints / NEWEST, "step under way": step_record(world.checkpoints)}
        found = [paths.get(name, world.checkpoints.with_suffix(".lock"))]
    return next((path for path in found if path.exists()), None)


def _whole(world: World) -> list[Path]:
    """The checkpoints that verify, oldest first."""
    store, found = CheckpointStore(world.checkpoints, KEY, KEEP), []
    for path in sorted(
        world.checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))
    ):
        try:
            store.verify(path)
        except (CheckpointError, OSError):  # pruned meanwhile
            continue
        found.append(path)
    return found
