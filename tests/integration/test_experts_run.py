"""A whole run of a mixture of experts: engines agree at each update, and tokens are trained with their experts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import tiny_moe, tiny_of
from tests.support.whole_run import rows, start, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WAYS = [
    ("transformers", 0, ("model.router_replay=true",)),
    ("vllm", 0, ("generator.count=1",)),
    ("vllm", 3, ("generator.count=1",)),
]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path) as path:
        # vLLM on CPUs has no attention for heads of fewer than 32 numbers.
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        tiny_moe(tmp_path / "model", hidden_size=128, moe_intermediate_size=64, **heads)
        yield path


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_vllm_gets_what_a_checkpoint_of_the_model_would_hold(config: Path, kind: str) -> None:
    tiny_of(config.parent / "model", kind, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    output = config.parent / "up.out"
    chosen = ("generator.engine=vllm", "generator.count=1", "learner.steps=3")
    assert start(config, *chosen).wait(timeout=600) == 0, output.read_text()[-3000:]
    updates = [row for row in rows(config.parent / "runs" / "whole") if "weights/probe_max" in row]
    assert updates and all(row["weights/probe_max"] < row["weights/probe_limit"] for row in updates)


@pytest.mark.parametrize(("engine", "stage", "more"), WAYS)
def test_it_trains_resumes_and_engines_agree(
    config: Path, engine: str, stage: int, more: tuple[str, ...]
) -> None:
    run = config.parent / "runs" / "whole"
    chosen = (f"generator.engine={engine}", f"learner.zero_stage={stage}", *more)
    output = config.parent / "up.out"
    for last in (3, 6):
        assert start(config, *chosen, f"learner.steps={last}").wait(timeout=600) == 0, output.read_text()[
            -3000:
        ]
    assert steps(run) == list(range(1, 7))
    updates = [row for row in rows(run) if "weights/probe_max" in row]
    # How many reports a step has in time is up to the machine.
    assert updates and all(row["weights/probe_max"] < row["weights/probe_limit"] for row in updates)
    assert max(row.get("weights/moved", 0) for row in rows(run)) > 1e-3
