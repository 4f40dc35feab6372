"""lm-evaluation-harness reads what `asyncrl export` writes, and finds the score and the error that we do."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.libraries import python_with
from tests.support.models import tiny_qwen2
from tests.support.whole_run import call, start, tiny_run

LM_EVAL_S = 300.0
# asyncrl hides foreign builds of torchvision, with which transformers cannot be imported.
HARNESS = "import asyncrl, runpy; runpy.run_module('lm_eval', run_name='__main__', alter_sys=True)"
OURS = "def odd(prompt, response, **row):\n    return sum(map(ord, response)) % 7 / 4\n"
THEIRS = "def odd(row, results):\n    return {'odd': sum(map(ord, results[0])) % 7 / 4}\n"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_the_harness_scores_an_export_as_our_own_evaluation_does(tmp_path: Path) -> None:
    """Both sample greedily with transformers, each by its own code, and score by the same function."""
    python = python_with(tmp_path / "python", ["lm-eval==0.4.13"], ["lm_eval.models.huggingface"])
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "score.py").write_text(THEIRS)
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 8},
        "process_results": "FUNCTION",
        "metric_list": [{"metric": "odd", "aggregation": "mean", "higher_is_better": True}],
    }
    text = yaml.safe_dump(task).replace("process_results: FUNCTION", "process_results: !function score.odd")
    (tasks / "sums.yaml").write_text(text)
    with tiny_run(tmp_path) as config:
        (tmp_path / "rewards.py").write_text(OURS)
        tiny_qwen2(tmp_path / "model", tied=False)  # tied random weights repeat one token
        up = start(config, "learner.steps=3", "eval.prompts=100")
        assert up.wait(timeout=300) == 0, (tmp_path / "up.out").read_text()[-3000:]
        run, export = tmp_path / "runs" / "whole", tmp_path / "export"
        call("export", str(run), "--to", str(export))
        ours = json.loads(call("eval", str(run)))
    command = [str(python), "-c", HARNESS, "run", "--model", "hf", "--tasks", "sums", "--device", "cpu"]
    command += ["--model_args", f"pretrained={export},dtype=float32", "--include_path", str(tasks)]
    command += ["--output_path", str(tmp_path / "scores"), "--batch_size", "20"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LM_EVAL_S, env=os.environ | offline, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (tmp_path / "scores").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]["sums"]
    assert ours["eval/prompts"] == 100 and ours["eval/se/reward_mean"] > 0, "else the answers are all alike"
    assert theirs["odd,none"] == pytest.approx(ours["eval/reward_mean"])
    assert theirs["odd_stderr,none"] == pytest.approx(ours["eval/se/reward_mean"])
