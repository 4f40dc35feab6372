"""Protocol code reads no wall clock but `types.time_of_day`: setting the clock does not change it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "asyncrl"
PROTOCOL = (
    "algo",
    "buffer",
    "control",
    "weights",
    "wire",
    "engine",
    "rewards",
    "batch",
    "trainer",
    "generator.py",
    "learner.py",
    "evaluation.py",
)
FOR_PEOPLE = {"buffer/probe.py"}
"""Compares the store's clock with ours, to say so."""
WALL = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "time.localtime",
    "time.gmtime",
}


def wall_clock_reads(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and f"{node.value.id}.{node.attr}" in WALL
        ):
            yield f"{path.name}:{node.lineno}"


def test_no_protocol_module_reads_the_wall_clock():
    places = [PACKAGE / place for place in PROTOCOL]
    modules = [module for place in places for module in ([place] if place.is_file() else place.rglob("*.py"))]
    assert len(modules) > 60
    found = [
        read
        for module in modules
        if str(module.relative_to(PACKAGE)) not in FOR_PEOPLE
        for read in wall_clock_reads(module)
    ]
    assert found == []


def test_it_would_be_found():
    assert list(wall_clock_reads(PACKAGE / "launch" / "status_page.py")) != []


def test_the_store_reads_its_clock_for_leases_alone():
    """Leases are about liveness: when the clock jumps, tickets are issued again; the first answer counts."""
    source = (PACKAGE / "buffer" / "functions.lua").read_text()
    assert source.count("call('TIME')") == 1
    name = source[: source.index("call('TIME')")].rpartition("local function ")[2].partition("(")[0]
    users = [line.strip() for line in source.splitlines() if f"{name}(" in line and "function" not in line]
    assert users and all("lease" in line or "deadline" in line or "now" in line for line in users), users
