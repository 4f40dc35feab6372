"""`asyncrl down` beside a parent that never asks how its child ended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.directory import RunDirectory
from asyncrl.launch.down import stop_run
from asyncrl.launch.environment import RUN_VARIABLE

pytestmark = pytest.mark.integration


def test_a_supervisor_that_has_ended_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=True)
    directory.config.write_text("run: {name: run}\n")
    environment = os.environ | {RUN_VARIABLE: str(directory.path.resolve())}
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    try:
        started_at = psutil.Process(supervisor.pid).create_time()
        directory.processes.write_text(json.dumps({"supervisor": supervisor.pid, "started_at": started_at, "children": {}}))
        begun_s = time.monotonic()
        stop_run(directory.path)
        assert psutil.Process(supervisor.pid).status() == psutil.STATUS_ZOMBIE
        assert time.monotonic() - begun_s < 30.0  # it would wait for a minute
    finally:
        supervisor.kill()
        supervisor.wait()
    assert capsys.readouterr().out.endswith("stopped, no process is left\n")
