"""`asyncrl play`: episodes of the first rows, turn by turn, as they would be trained."""

import itertools
import json
from collections.abc import Iterator, Sequence
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
    for group in ask("asyncrl.results.play", config, overrides, str(rows)):
        yield from map(visible, _lines(**group))


async def _play(config: Config, rows: str) -> list[dict[str, Any]]:
    prompts = PromptSource.of(config)
    spec = SamplingSpec.of(config.sampling, config.sampling.temperature)
    limits, _ = group_limits(config, vocabulary_size(config.model))
    async with sampler_of(config, prompts, "play", range(len(config.data.train))) as sampler:
        one = replace(limits, rollouts=1, required=())  # a teacher does not run here
        return [
            plain(await sampler.group(prompts.prompt(ticket), ticket, one, spec), prompts)
            for ticket in range(1, int(rows) + 1)
        ]


def plain(group: Group, prompts: PromptSource) -> dict[str, Any]:
    """Return the group of one episode as JSON values; a piece is text of one kind and of one version."""
    decode = prompts.tokenizer.decode
    return {
        "row": {key: str(value)[:80] for key, value in prompts.prompt(group.ticket_id).row.items()},
        "sequences": [
            [
                (kind, version, decode(ids), ids)
                for kind, version, ids in (("prompt", None, one.prompt_ids.tolist()), *pieces(one))
            ]
            for one in group.rollouts
        ],
        "metrics": {name: float(values[0]) for name, values in group.episode_metrics.items()},
        "end": group.rollouts[0].finish_reason,
        "reward": group.rollouts[0].reward,
        "parts": dict(group.rollouts[0].reward_parts),
    }


def pieces(rollout: Rollout) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (action or context, version, ids) of each run of tokens of the response."""
    columns = zip(
        rollout.action_mask.tolist(), rollout.versions.tolist(), rollout.response_ids.tolist(), strict=True
    )
    for (is_action, version), run in itertools.groupby(columns, key=lambda column: column[:2]):
        yield ("action" if is_action else "context"), version, [token for *_, token in run]


def _lines(
    row: dict[str, str],
    sequences: list[list[tuple[str, int | None, str, list[int]]]],
    metrics: dict[str, float],
    end: str,
    reward: float,
    parts: dict[str, float],
) -> Iterator[str]:
    yield f"row {json.dumps(row, ensure_ascii=False)}"
    for number, sequence in enumerate(sequences, start=1):
        if len(sequences) > 1:
            yield f"  sequence {number} of {len(sequences)}"
        for kind, version, text, ids in sequence:
            label = kind if version is None else f"{kind} v{version}"
            more = f" ... {len(ids)} in all" if len(ids) > SHOWN_IDS else ""
            shown = " ".join(map(str, ids[:SHOWN_IDS]))
            yield f"  {label:<11} {json.dumps(text, ensure_ascii=False)}  [{shown}{more}]"
    scored = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    counted = ", ".join(f"{name} {value:g}" for name, value in sorted(metrics.items()))
    yield f"  {end}: reward {reward:g} ({scored})" + (f"; {counted}" if counted else "")


if __name__ == "__main__":
    serve(_play)
# As in `evaluate.py`.
elif __name__ == "__mp_main__":
    die_with_spawner()
