"""`asyncrl play`: episodes of the first rows, turn by turn, as they would be trained."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.buffer.lanes import group_limits
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, vocabulary_size
from asyncrl.engine.base import SamplingSpec
from asyncrl.hosting.processes import die_with_spawner
from asyncrl.results.engine_process import ask, sampler_of, serve
from asyncrl.telemetry.text import visible
from asyncrl.types import Group, Rollout

SHOWN_IDS = 24  # of one piece of a sequence


def play_rows(config: Path, overrides: Sequence[str], rows: int) -> Iterator[str]:
    """Play one episode of each of the first tickets; yield lines that show them. Raises AsyncRLError."""
    yield from map(visible, ask("asyncrl.results.play", config, overrides, str(rows)))


async def _play(config: Config, rows: str) -> list[str]:
    prompts = PromptSource.of(config)
    spec = SamplingSpec.of(config.sampling, config.sampling.temperature)
    limits, _ = group_limits(config, vocabulary_size(config.model))
    one = replace(limits, rollouts=1, required=())  # a teacher does not run here
    lines: list[str] = []
    async with sampler_of(config, prompts, "play", range(len(config.data.train))) as sampler:
        for ticket in range(1, int(rows) + 1):
            prompt = prompts.prompt(ticket)
            lines += shown(
                await sampler.group(prompt, ticket, one, spec), prompt.row, prompts.tokenizer.decode
            )
    return lines


def shown(group: Group, row: Mapping[str, Any], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yield the lines that show the group of one episode; a piece is text of one kind and of one version."""
    yield f"row {json.dumps({key: str(value)[:80] for key, value in row.items()}, ensure_ascii=False)}"
    for number, rollout in enumerate(group.rollouts, start=1):
        if len(group.rollouts) > 1:
            yield f"  sequence {number} of {len(group.rollouts)}"
        for label, ids in (("prompt", rollout.prompt_ids.tolist()), *pieces(rollout)):
            more = f" ... {len(ids)} in all" if len(ids) > SHOWN_IDS else ""
            numbers = " ".join(map(str, ids[:SHOWN_IDS]))
            yield f"  {label:<11} {json.dumps(decode(ids), ensure_ascii=False)}  [{numbers}{more}]"
    last = group.rollouts[0]
    scored = ", ".join(f"{name} {value:g}" for name, value in last.reward_parts.items())
    counted = ", ".join(f"{name} {values[0]:g}" for name, values in sorted(group.episode_metrics.items()))
    yield f"  {last.finish_reason}: reward {last.reward:g} ({scored})" + (f"; {counted}" if counted else "")


def pieces(rollout: Rollout) -> Iterator[tuple[str, list[int]]]:
    """Yield ("action v3" or "context v3", ids) of each run of tokens of the response."""
    columns = zip(
        rollout.action_mask.tolist(), rollout.versions.tolist(), rollout.response_ids.tolist(), strict=True
    )
    for (is_action, version), run in itertools.groupby(columns, key=lambda column: column[:2]):
        yield f"{'action' if is_action else 'context'} v{version}", [token for *_, token in run]


if __name__ == "__main__":
    serve(_play)
# As in `evaluate.py`.
elif __name__ == "__mp_main__":
    die_with_spawner()
