"""A process of a reward model, judge or teacher: it has no state, and dies with its supervisor."""

import argparse
import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import SamplingConfig
from asyncrl.control.scoring import NOTHING, Score, serve_scores
from asyncrl.data.prompts import load_tokenizer
from asyncrl.engine.base import Engine, SamplingSpec
from asyncrl.engine.open import open_classifier, open_engine
from asyncrl.errors import DataError, EngineError, ungrouped
from asyncrl.hosting.gpus import resolve_device
from asyncrl.hosting.processes import die_with_spawner
from asyncrl.hosting.progress import Pace, beat, begin
from asyncrl.launch.generator_process import allotted
from asyncrl.launch.roles import run_role
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import forget_secrets
from asyncrl.telemetry.logs import setup_logging

log = logging.getLogger(__name__)
# Seconds between two proofs that the engine lives. After each, vLLM's worker looks for work for a second
# without pause, on a core of its own.
PROBE_S = 10.0


def main() -> None:
    """Parse arguments and score until the run ends."""
    parser = argparse.ArgumentParser(prog="asyncrl-scorer")
    parser.add_argument("--id", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--memory-share", type=float)
    parser.add_argument("--shared-gpu", action="store_true")
    arguments = parser.parse_args()

    def role() -> None:
        directory = RunDirectory(arguments.config.parent)
        setup_logging(arguments.id, directory.logs, console=True)
        forget_secrets(os.environ)
        config, share, is_shared = load_config(arguments.config), arguments.memory_share, arguments.shared_gpu
        asyncio.run(_score(config, arguments.name, arguments.endpoint, share, is_shared=is_shared))

    run_role(role)


async def _score(
    config: Config, name: str, endpoint: str, share: float | None = None, *, is_shared: bool = False
) -> None:
    begin("load the model", Pace.SLOW)
    scorer = config.served[name]
    model = scorer.model
    log.info("loading %s", model)
    sampling, device = config.sampling, resolve_device(config)
    other = {"path": model, "revision": None, "chat_template": True, "lora": None, "router_replay": False}
    own = config.reference if name in config.teacher else config.model.model_copy(update=other)
    # The settings of vLLM are of the policy, and so is a cache on a GPU. Of GPUs that are named, this process
    # sees one, and a classifier takes one.
    is_narrow = scorer.gpus or name in config.scorers.keys() - config.judges
    ours: dict[str, Any] = {"vllm": {}} | ({"tensor_parallel": 1} if is_narrow else {})
    ours |= {"kv_cache_gib": None} if share else {}
    settings = {"model": own, "generator": config.generator.model_copy(update=ours)}
    generator = allotted(config.model_copy(update=settings), share, is_shared=is_shared)
    if share and (generator.kv_cache_gib or 1) * 2**30 <= 1:  # nothing is left of it
        found = f"{model} needs more than its share of a GPU, {share:.0%}"
        raise DataError(f"{found}; give it a GPU of its own (`gpus`) or a larger one, or a smaller model")
    score: Score
    if name in config.teacher:
        # vLLM samples one token behind those it scores.
        sampling = sampling.model_copy(update={"max_response_tokens": sampling.max_response_tokens + 1})
        engine = await open_engine(own, generator, sampling, config.weights, device=device)

        async def score(request: Mapping[str, Any]) -> bytes:
            return (await engine.score(request["ids"])).astype(np.float32).tobytes()
    elif name in config.judges:
        sampling = SamplingConfig(max_prompt_tokens=scorer.max_tokens - 1, max_response_tokens=1)
        engine = await open_engine(own, generator, sampling, config.weights, device=device)
        score = partial(_judgement, engine, load_tokenizer(own), scorer.max_tokens)
    else:
        # The longest sequence of the policy, and no token of its own.
        dtype, most = config.model.dtype, sampling.max_tokens
        classify = open_classifier(model, dtype, generator, max_tokens=most, device=device)

        async def score(request: Mapping[str, Any]) -> float:
            return await classify(request["ids"])

    await score(NOTHING)  # warm, and known to work
    begin("score")
    with ungrouped():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_scores(endpoint, score))
            while True:
                await score(NOTHING)
                beat()
                await asyncio.sleep(PROBE_S)


async def _judgement(engine: Engine, tokenizer: Any, most: int, request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion of a request, of at most so many tokens together. Raises EngineError."""
    if "messages" not in request:
        await engine.score(request["ids"])
        return {}
    messages = request["messages"]
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # of the template
        raise EngineError(f"the chat template cannot render the question: {error}") from error
    if len(ids) + (answer := request["max_tokens"]) > most:
        text = f"a question of {len(ids)} tokens and an answer of {answer} are more than {most}"
        raise EngineError(f"{text}; raise max_tokens of the scorer")
    spec = SamplingSpec(temperature=request["temperature"], max_response_tokens=answer)
    (said,) = await engine.sample(ids, 1, spec)
    words = tokenizer.decode(said.response_ids, skip_special_tokens=True)
    return {"choices": [{"message": {"content": words}}]}


if __name__ == "__main__":
    main()
# For the engine's processes, which wait minutes for a dead parent before they load our plugin.
elif __name__ == "__mp_main__":
    die_with_spawner()
