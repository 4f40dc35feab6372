"""The shape of the code: imports point down, the pure part is pure, heavy libraries stay put, files small."""

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "asyncrl"
LAYER = {
    "version": 0, "lineage": 0, "types": 0, "columns": 0, "errors": 0, "backoff": 0, "files": 0, "plugins": 0, "builds": 0,
    "algo": 1, "unpickling": 1, "best_effort": 1, "session": 1, "sandbox": 1,
    "config": 2,
    "lora": 2.5,
    "routing": 2.5,
    "hosting": 3,
    "wire": 4, "stopwatch": 4,
    "weights": 5,
    "buffer": 6, "control": 6, "engine": 6, "trainer": 6, "batch": 6, "rewards": 6, "environments": 6, "telemetry": 6,
    "data": 6,
    "learner": 7, "generator": 7, "evaluation": 7, "run": 7, "addons": 7,
    "report": 8,
    "launch": 9,
    "stages": 10, "cluster": 10,
    "commands": 11, "preflight": 11, "results": 11, "quickstart": 11,
    "api": 12, "cli": 12,
}  # fmt: skip
SAME_PART = {"lineage": "types", "adoption": "generator", "heartbeats": "generator", "__main__": "cli"}
"""The generator's loop is three modules: tickets and groups, weights, what it reports of itself. `python -m
asyncrl` is the command line."""
OWNERS = {
    "vllm": {"engine"},
    "deepspeed": {"trainer"},
    "redis": {"buffer"},
    "zmq": {"control"},
    "uvicorn": {"addons"},
    "wandb": {"telemetry"},
    "tensorboard": {"telemetry"},
    "prometheus_client": {"telemetry"},
    "typer": {"cli"},
    "trl": {"stages"},
    "ray": {"cluster"},
}
# An adapter's package, and the module that chooses it.
OPENS = {
    "trainer.deepspeed": "launch.training",
    "engine.vllm": "engine.open",
    "engine.transformers": "engine.open",
    "addons.endpoint": "launch.players",
}
PURE = {"torch", "numpy", "asyncrl", "collections", "dataclasses", "math", "typing", "enum"}
READS_THE_ENVIRONMENT = {
    # entry points: what a process was called with, which they pass on
    "cli/main.py", "commands/hosts.py", "commands/up.py", "commands/join.py", "commands/found.py", "commands/rank_host.py", "commands/inspect.py", "preflight/checks/this_run.py",
    "launch/learner_process.py", "launch/generator_process.py", "launch/scorer_process.py", "launch/ranks.py", "launch/roles.py", "stages/process.py",
    # what child processes inherit
    "hosting/processes.py", "hosting/environment.py", "hosting/gpus.py", "results/engine_process.py",
    "addons/adapters/mcp.py", "environments/episode_worker.py", "rewards/reward_process.py", "sandbox/bubblewrap.py",
    # settings that a library or a compiler takes from nowhere else
    "engine/vllm/args.py", "engine/vllm/plugin.py", "telemetry/trackers.py",
    "trainer/collectives.py", "trainer/deepspeed/engine_settings.py", "weights/slots.py",
    # the board where every process shows its progress; values that no log may show
    "hosting/progress.py", "telemetry/logs.py",
    # what the commands of hosts inherit
    "cluster/local.py", "cluster/ray.py", "cluster/slurm.py",
    # keys of services, in the variables that a config names
    "rewards/endpoints.py",
}  # fmt: skip
# The root names what users import, for type checkers. No module imports it.
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports_of(path: Path) -> list[str]:
    """Every module named in an import statement, wherever it stands."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "asyncrl":
            found += [f"asyncrl.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def part_of(path: Path) -> str:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return SAME_PART.get(part, part)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    here = part_of(path)
    for module in imports_of(path):
        there = module.split(".")[1] if module.startswith("asyncrl.") else here
        there = SAME_PART.get(there, there)
        if there == here:
            continue
        # evaluation and learner are read by what reports on them, one layer up; on one layer only interfaces
        # are seen
        is_interface = module.endswith(".base") or module == "asyncrl.buffer.ledger"
        assert LAYER[there] < LAYER[here] or (LAYER[there] == LAYER[here] and is_interface), module


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def graph_of(room: Callable[[str], str]) -> dict[str, set[str]]:
    """Who imports whom, for type checking too; `room` says what a module counts as."""
    known = {dotted(path) for path in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        named = [
            f"{node.module}.{alias.name}"
            for node in nodes_of(path)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        for module in [*imports_of(path), *named]:
            if module in known:
                graph.setdefault(room(dotted(path)), set()).add(room(module))
    return {here: there - {here} for here, there in graph.items()}


def test_no_modules_import_each_other():
    tuple(graphlib.TopologicalSorter(graph_of(lambda module: module)).static_order())


def test_no_packages_import_each_other():
    tuple(graphlib.TopologicalSorter(graph_of(lambda module: module.split(".")[1])).static_order())


def test_a_cycle_would_be_found():
    with pytest.raises(graphlib.CycleError):
        tuple(
            graphlib.TopologicalSorter(
                graph_of(lambda module: "even" if len(module) % 2 else "odd")
            ).static_order()
        )


def test_a_module_is_known_by_its_name_alone():
    names = Counter(path.stem for path in MODULES if path.stem not in ("base", "open", "__init__"))
    assert not [name for name, number in names.items() if number > 1]


@pytest.mark.parametrize("library", OWNERS)
def test_a_heavy_library_is_imported_in_its_package_only(library):
    users = {
        part_of(path)
        for path in MODULES
        if any(module.split(".")[0] == library for module in imports_of(path))
    }
    assert users <= OWNERS[library]


def test_a_run_without_addons_imports_none():
    check = "import sys, asyncrl.launch.players; sys.exit('asyncrl.addons' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=300, check=False).returncode == 0


@pytest.mark.parametrize("adapter", OPENS)
def test_an_adapter_is_imported_by_its_open_only(adapter):
    def is_inside(module: str) -> bool:
        return f"{module}.".startswith(f"asyncrl.{adapter}.")

    graph = graph_of(lambda module: module)
    users = {module for module, imported in graph.items() if any(map(is_inside, imported))}
    assert {module for module in users if not is_inside(module)} == {f"asyncrl.{OPENS[adapter]}"}


def test_the_mathematics_does_no_io():
    for path in (PACKAGE / "algo").rglob("*.py"):
        allowed = PURE | {"pydantic"} if path.name == "ranges.py" else PURE
        outside = {module.split(".")[0] for module in imports_of(path)} - allowed
        assert not outside, f"{path.name} imports {sorted(outside)}"


def test_what_is_below_the_entry_points_is_passed_and_not_read_from_the_environment():
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    readers = set()
    for path in MODULES:
        for node in nodes_of(path):
            is_read = isinstance(node, ast.Attribute) and ast.unparse(node) in {
                f"os.{name}" for name in names
            }
            is_import = isinstance(node, ast.ImportFrom) and any(alias.name in names for alias in node.names)
            if is_read or is_import:
                readers.add(str(path.relative_to(PACKAGE)))
    assert readers == READS_THE_ENVIRONMENT


def test_no_module_needs_a_second_sitting():
    too_long = {path.name: lines for path in MODULES if (lines := len(path.read_text().splitlines())) > 400}
    assert not too_long


def test_launch_only_says_what_starts_what():
    """A module that opens parts imports few others: each part is opened in its own package."""
    imports = graph_of(lambda module: module)
    too_many = {here: len(there) for here, there in imports.items() if ".launch." in here and len(there) > 20}
    assert not too_many


def test_few_functions_are_long():
    lengths = [
        node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert sorted(lengths)[len(lengths) // 2] <= 12
    assert sum(length > 60 for length in lengths) <= 0.03 * len(lengths)


@pytest.mark.parametrize(
    "module",
    [
        "asyncrl.cli.main",
        "asyncrl.cli.screens",
        "asyncrl.config.load",
        "asyncrl.config.registry",
        "asyncrl.hosting.supervisor",
        "asyncrl.preflight.fit",
        "asyncrl.preflight.reward_trial",
        "asyncrl.preflight.validate",
        "asyncrl.quickstart.first_task",
        "asyncrl.results.compare",
    ],
)
def test_commands_that_need_no_model_start_without_torch(module):
    check = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm', 'deepspeed')))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


def test_only_the_command_line_prints():
    """Commands and results return values; `cli` prints them."""
    printing = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        if part_of(path) != "cli"
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and node.id == "print"
    }
    assert not printing
