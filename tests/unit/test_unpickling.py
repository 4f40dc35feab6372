"""Nothing in the package unpickles, and processes refuse what a library would unpickle from a wire."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "asyncrl"
MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
}
FORBIDDEN_CALLS = {
    *("recv_pyobj", "send_pyobj", "eval", "exec", "unsafe_load", "full_load"),
    *(
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
    ),
    *("recv_object_list", "rpc_sync", "rpc_async"),
}

# What a process in a sandbox of its own is there for, and a function of a notebook that is written down as a
# file: only processes of rewards, which run the user's code, load that file.
ALLOWED = {"sandbox/inside.py": ["exec"], "run/given.py": ["cloudpickle"]}


def findings(source: str) -> list[str]:
    """What could unpickle, or run what came from outside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if ast.unparse(node) == "from pickle import UnpicklingError":
                continue  # what torch raises for a file that it refuses
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in FORBIDDEN_CALLS and not (name == "eval" and owner):  # torch's model.eval() is another
                found.append(name)
            if (owner, name) == ("torch", "load") and options.get("weights_only") != "True":
                found.append("torch.load")
            if (owner, name) == ("yaml", "load") or options.get("allow_pickle") == "True":
                found.append(name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_unpickles(path):
    allowed = ALLOWED.get(str(path.relative_to(PACKAGE)), [])
    assert findings(path.read_text()) == allowed


@pytest.mark.parametrize(
    "source",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "import dill.source",
            "socket.recv_pyobj()",
            "eval(text)",
            "exec(text)",
        ),
        *(
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "numpy.load(path, allow_pickle=True)",
            "yaml.load(text)",
        ),
        *("dist.broadcast_object_list(values)", "if True:\n    def f():\n        import marshal"),
    ],
)
def test_the_search_finds_what_it_is_for(source):
    assert findings(source)
    assert findings("torch.load(path, weights_only=True); model.eval(); yaml.safe_load(text)") == []


PRELUDE = """
import pickle
from asyncrl.errors import WireError
from asyncrl.unpickling import refuse_pickles_from_wires
refuse_pickles_from_wires()
class Evil:
    def __reduce__(self):
        return (print, ("ran",))
data = pickle.dumps(Evil())
def inside(module, code):
    try:
        exec(code, {"__name__": module, "data": data, "pickle": pickle})
    except WireError as error:
        print("refused", error)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    ["asyncrl.buffer.redis", "redis.client", "zmq.sugar.socket", "torch.distributed.distributed_c10d"],
)
@pytest.mark.parametrize(
    "how",
    ["pickle.loads(data)", "pickle._loads(data)", "import io; pickle.Unpickler(io.BytesIO(data)).load()"],
)
def test_a_pickle_on_a_wire_is_refused_before_it_runs(module, how):
    said = run(f"inside({module!r}, {how!r})")
    assert said.startswith(f"refused {module} met a pickle that asks for builtins.print")
    assert "ran" not in said


def test_zmq_itself_is_held_to_it():
    said = run(
        "import zmq\n"
        "context = zmq.Context()\n"
        "a, b = context.socket(zmq.PAIR), context.socket(zmq.PAIR)\n"
        "a.bind('inproc://x'); b.connect('inproc://x'); a.send(data)\n"
        "try:\n    b.recv_pyobj()\nexcept WireError:\n    print('refused')\n"
        "a.close(); b.close(); context.term()\n"
    )
    assert said == "refused\n"


def test_the_users_own_code_and_verified_files_are_left_alone(tmp_path):
    assert run("inside('my_reward', 'pickle.loads(data)')") == "ran\n"
    loading = (
        "torch.save({'a': torch.ones(2), 'path': __import__('pathlib').Path('x')}, "
        f"{str(tmp_path / 'f')!r})\n"
    )
    said = run(
        f"import torch\n{loading}print(sorted(torch.load({str(tmp_path / 'f')!r}, weights_only=False)))"
    )
    assert said == "['a', 'path']\n"
