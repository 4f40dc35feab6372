"""TensorBoard's own code: its reader reads back what was written."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = str(Path(__file__).parents[2])
WRITER = """
import math, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.telemetry_records import LAGS, record
from asyncrl.config.sections import TelemetryConfig
from asyncrl.telemetry.fanout import open_trackers
directory = Path({directory!r})
for step, steps in ((0, [1, 2, 3, 12]), (2, [3, 4])):  # the second process resumes after step 2
    trackers = open_trackers(
        TelemetryConfig({tracker}=True), "quick", directory,
        {{"batch": {{"groups": 32}}, "weights": {{"probe_limit": 0.05}}}}, key_id="5a17", step=step,
    )
    for done in steps:
        trackers.log({{"reward/mean": done + step / 10, "policy/loss": math.nan, **LAGS}}, step=done)
        trackers.samples([record(step=done, response="<b>\\n| 4")])
    trackers.log({{"tokens_per_s": 7.0}})
    trackers.close()
"""


def write(tmp_path: Path, tracker: str) -> None:
    script = WRITER.format(root=ROOT, directory=str(tmp_path / "run"), tracker=tracker)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr, done.stderr


def test_tensorboard_reads_scalars_histograms_samples_and_config_and_forgets_what_was_made_again(
    tmp_path: Path,
) -> None:
    write(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(tmp_path / "run" / "tensorboard"), {"tensors": 0, "scalars": 0, "histograms": 0}
    ).Reload()
    rewards = [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")]
    assert rewards == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2)], (
        "step 12 and the first step 3 are of a discarded history"
    )
    assert all(math.isnan(event.value) for event in events.Scalars("policy/loss"))
    assert "tokens_per_s" not in events.Tags()["scalars"], "TensorBoard has steps only"
    lags = events.Histograms("staleness/in_queue/histogram")[0].histogram_value
    assert (lags.num, lags.sum, list(lags.bucket_limit), list(lags.bucket)) == (
        1.0,
        0.75,
        [1.0, 2.0, 3.0],
        [0.625, 0.0, 0.375],
    )
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]
    }
    config = "\n".join(line.removeprefix("    ") for line in texts["config/text_summary"].splitlines())
    assert json.loads(config)["batch"] == {"groups": 32}
    sample = texts["samples/train/text_summary"].splitlines()
    assert all(line.startswith("    ") for line in sample), "code, so that no markdown of a model is rendered"
    assert "    response: <b>" in sample and "    | 4" in sample
