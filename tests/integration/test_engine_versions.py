"""Real engines of a model that says one token, another one in each version."""

import asyncio

import numpy as np
import pytest

from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.vllm.engine import VLLMEngine
from tests.support.vllm_engines import (
    LINEAGE,
    apply,
    disk_order,
    load,
    needs_stories,
    one_token_llama,
    running_engine,
    saying,
)
from tests.support.waiting import turns, until

pytestmark = [pytest.mark.integration, needs_stories]

SPEC = SamplingSpec(temperature=1.0, max_response_tokens=250)
FIRST_TOKEN = 100
"""Version v of the one-token model says token FIRST_TOKEN + v, whatever it is asked."""


@pytest.fixture(scope="module")
def one_token(request, tmp_path_factory):
    """An engine of the one-token model."""
    directory = one_token_llama(tmp_path_factory.mktemp("one_token") / "model")
    with running_engine(directory, **request.param) as (runner, engine):
        yield runner, engine, directory


TRANSFORMERS, VLLM = {"engine": "transformers"}, {"engine": "vllm"}


@pytest.mark.parametrize("one_token", [TRANSFORMERS, VLLM, VLLM | {"recompute_kv": True}], indirect=True)
def test_every_token_is_labelled_with_the_version_that_sampled_it(one_token, tmp_path):
    runner, engine, directory = one_token
    model = load(directory)
    requests = 60 if isinstance(engine, VLLMEngine) else 20  # these run one after the other
    # Written before, so that a busy machine slows requests and updates alike.
    orders = [disk_order(version, saying(model, FIRST_TOKEN + version), tmp_path) for version in range(1, 31)]

    async def scenario():
        applied = 0

        async def ask(position):
            # So that some are being prefilled, and some new, in each update.
            await until(lambda: applied >= position // 2)
            prompt = [1, *([300] * (position % 7)), 301]
            return await engine.sample(prompt, 2, SPEC)

        rollouts = asyncio.gather(*(ask(position) for position in range(requests)))
        for order in orders:
            await apply(engine, order)
            applied = order.version
            await turns(1)
            await engine.progress()
        return [rollout for group in await rollouts for rollout in group]

    rollouts = runner.run(scenario())
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout.response_ids - FIRST_TOKEN, rollout.versions)
        np.testing.assert_allclose(rollout.behaviour_logprobs, 0.0, atol=1e-4)
        assert (
            rollout.action_mask.all()
            and len(rollout.response_ids) == 250
            and rollout.finish_reason == "length"
        )
        assert all(span.lineage == (LINEAGE if span.version else 0) for span in rollout.version_spans)
    spans = [len(rollout.version_spans) for rollout in rollouts]
    assert max(spans) >= 3, "the updates must fall within the requests"
    assert len({version for rollout in rollouts for version, *_ in rollout.version_spans}) >= 10


@pytest.mark.parametrize("one_token", [TRANSFORMERS, VLLM], indirect=True)
def test_the_token_that_ends_a_response_is_part_of_it(one_token, tmp_path):
    runner, engine, directory = one_token
    runner.run(apply(engine, disk_order(31, saying(load(directory), 2), tmp_path)))  # 2 ends a sequence
    (rollout,) = runner.run(engine.sample([1, 300], 1, SPEC))
    runner.run(apply(engine, disk_order(0, load(directory), tmp_path)))
    assert rollout.response_ids.tolist() == [2] and rollout.finish_reason == "stop"
    assert rollout.behaviour_logprobs[0] == pytest.approx(0.0, abs=1e-4)
