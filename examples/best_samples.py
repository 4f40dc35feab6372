"""Rows for `asyncrl stage` from the samples of a run: `python examples/best_samples.py RUN DIRECTORY`.

A row has a prompt and the response with the highest reward among its samples. Every tenth prompt is held out.
"""

import json
import sys
from pathlib import Path

run, to = map(Path, sys.argv[1:])
best: dict[str, tuple[float, str]] = {}
with (run / "samples.jsonl").open(encoding="utf-8") as lines:
    for sample in map(json.loads, lines):
        if sample["kind"] == "train" and sample["response"] and (sample["reward"] or 0.0) > 0.0:
            found = (sample["reward"], sample["response"])
            best[sample["prompt"]] = max(found, best.get(sample["prompt"], found))
rows = [{"prompt": prompt, "completion": best[prompt][1]} for prompt in sorted(best)]
for name, chosen in (
    ("best", [row for index, row in enumerate(rows) if index % 10]),
    ("best-eval", rows[::10]),
):
    text = "".join(json.dumps(row) + "\n" for row in chosen)
    (to / f"{name}.jsonl").write_text(text, encoding="utf-8")
