"""vLLM's model runner of GPUs, on a CPU: its kernels, written in Triton, run in Triton's interpreter.

vLLM has two model runners, and takes the newer one wherever Triton has a driver, so never on a CPU. It
samples, and computes log-probabilities, in code of its own, and begins a step before the last one has ended.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.vllm_engines import needs_stories

pytestmark = [pytest.mark.integration, needs_stories]

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_it_is_the_model_runner_that_is_expected",
    "test_behaviour_logprobs_are_the_models_at_the_sampling_temperature[0.6-vllm]",
    "test_a_rollout_records_what_was_left_to_sample_and_its_probability_among_it[vllm]",
    "test_score_is_at_temperature_one[vllm]",
    "test_prompts_cached_under_old_weights_are_not_used_by_new_requests[vllm]",
    "test_the_engine_scores_like_the_model_that_was_sent[vllm-slot]",
    "test_requests_run_on_while_a_version_arrives_and_its_tokens_are_of_the_old_one[vllm]",
    "test_a_wrong_tensor_is_named_and_never_sampled[vllm-slot-one element]",
)


@pytest.mark.timeout(2700)
def test_the_model_runner_of_gpus_samples_scores_and_loads_as_that_of_cpus():
    pytest.importorskip("triton")
    paths = [str(ROOT / "tests" / "support" / "interpreter"), str(ROOT)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "2400"]
    command += [f"{ROOT}/tests/integration/test_engine.py::{name}" for name in TESTS]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2600,
        check=False,
    )
    assert done.returncode == 0 and f"{len(TESTS)} passed" in done.stdout, done.stdout[-4000:]
