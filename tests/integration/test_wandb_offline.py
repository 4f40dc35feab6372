"""W&B's own code, without a network: what it wrote is read back from its file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

HISTOGRAM = "staleness/in_queue/histogram"
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.telemetry_records import LAGS, record
from asyncrl.config.sections import TelemetryConfig
from asyncrl.telemetry.fanout import open_trackers
directory = Path({directory!r})
trackers = open_trackers(
    TelemetryConfig(wandb="offline", wandb_project="p"), "quickstart", directory,
    {{"batch": {{"groups": 32}}, "weights": {{"probe_limit": 0.05}}}}, key_id="5a17",
)
for step in [1, 2, 3, 2, 3, 25]:  # a resume goes back
    held_out = {{"eval/hard/accuracy": 0.5, "eval/hard/se/accuracy": 0.125, "eval/hard/prompts": 1000.0}}
    trackers.log({{"reward/mean": step / 10, **LAGS, **(held_out if step == 3 else {{}})}}, step=step)
    trackers.samples([record(step=step), record(step=step, response="[red]\\x1b[31m")])
trackers.close()
"""

READER = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def frames(data, block=32768):
    # LevelDB's log format behind a header of seven bytes: crc (4), length (2), kind (1: whole, 2: first, 3: middle, 4: last).
    at, parts = 7, []
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []

for frame in frames(open(sys.argv[1], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(frame)
    if record.WhichOneof("record_type") == "history":
        row = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        print(json.dumps({"history": row}))
    if record.WhichOneof("record_type") == "summary":
        print(json.dumps({"summed": {item.key: json.loads(item.value_json) for item in record.summary.update}}))
    if record.WhichOneof("record_type") == "metric":
        kinds = [kind.name for kind, wanted in record.metric.summary.ListFields() if wanted]
        name = record.metric.glob_name or record.metric.name
        print(json.dumps({"metric": name, "x": record.metric.step_metric, "summary": kinds}))
    if record.WhichOneof("record_type") == "run":
        config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        print(json.dumps({"run": record.run.run_id, "project": record.run.project, "config": config}))
"""


def test_an_offline_run_holds_config_metrics_by_step_and_samples(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
    }
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        environment.pop(name, None)
    script = SCRIPT.format(root=root, directory=str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-quickstart-5a17.wandb")
    read = subprocess.run(
        [sys.executable, "-c", READER, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    records = [json.loads(line) for line in read.stdout.splitlines()]
    (run,) = [record for record in records if "run" in record][:1]
    assert (run["run"], run["project"]) == ("quickstart-5a17", "p") and run["config"]["batch"] == {
        "groups": 32
    }
    rows = [record["history"] for record in records if "history" in record]
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (2, 0.2), (3, 0.3), (25, 2.5),
    ]  # fmt: skip
    assert [row["overview/reward mean"] for row in rows if "overview/reward mean" in row] == [
        0.1,
        0.2,
        0.3,
        0.2,
        0.3,
        2.5,
    ]
    lags = [
        (row[f"{HISTOGRAM}.bins"], row[f"{HISTOGRAM}.values"]) for row in rows if f"{HISTOGRAM}._type" in row
    ]
    assert lags == [([0, 1, 2, 3], [0.625, 0, 0.375])] * 6
    metrics = {record["metric"]: (record["x"], record["summary"]) for record in records if "metric" in record}
    assert metrics["*"][0] == metrics["reward/mean"][0] == "step" and sorted(metrics["reward/mean"][1]) == [
        "last",
        "max",
    ]
    summed = [record["summed"] for record in records if "summed" in record]
    assert {"eval/hard/accuracy with error": "0.5 ± 0.12 (n 1,000)"} in summed
    tables = [row for row in rows if any(key.startswith("samples/train") for key in row)]
    assert [row["step"] for row in tables] == [1, 25], "every ten steps"
    (table,) = list((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/samples/train_*"))[:1]
    content = json.loads(table.read_text())
    assert (
        content["columns"][:4] == ["step", "kind", "prompt", "response"]
        and content["data"][1][3] == "[red]\x1b[31m"
    )
