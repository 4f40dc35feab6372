"""A rollout in full, for people: on a terminal here, on a page by `page`. The dashboard has a shorter one."""

import math

from rich.text import Text

from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.text import number, visible, visible_lines

KINDS = {"train": "trained", "eval": "held-out", "dropped": "dropped"}


def sample_head(sample: SampleRecord) -> tuple[str, str]:
    """(which one it is and what it got, all else that is known about it but its text)."""
    head = f"step {sample.step}, {KINDS.get(sample.kind, sample.kind)}"
    head += f" ({sample.reason})" if sample.reason else ""
    head += f": reward {number(sample.reward)}" if not math.isnan(sample.reward) else ""
    parts = ", ".join(f"{name} {number(value)}" for name, value in sample.parts.items())
    advantage = "" if math.isnan(sample.advantage) or sample.kind != "train" else f"advantage {number(sample.advantage)}"
    spans = ", ".join(f"v{version} {tokens}" for version, tokens in sample.versions)
    tokens = f"tokens by version: {spans}" if spans else ""
    answer = f"answer {sample.answer}" if sample.answer else ""
    details = (answer, parts, advantage, tokens, sample.finish_reason, sample.generator_id, f"ticket {sample.ticket_id}")
    return head, " · ".join(detail for detail in details if detail)


def full_lines(sample: SampleRecord) -> list[Text]:
    """Head, prompt and response. What a model wrote stands behind a bar, so that it cannot look like one of our lines."""
    head, details = sample_head(sample)
    style = "yellow" if math.isnan(sample.reward) or sample.reward <= 0 else "green"
    lines = [Text.assemble((visible(head), style), ("  " + visible(details), "dim"))]
    lines += [Text(f"  ? {line}", "dim") for line in visible_lines(sample.prompt).split("\n") if sample.prompt]
    lines += [Text(f"  | {line}") for line in visible_lines(sample.response).split("\n") if sample.response]
    return lines
