"""The game of `configs/calculator.yaml` as an agent: a program that calls the model with `openai`.

The program needs nothing of asyncrl. `configs/agent.yaml` starts it once for each episode.
"""

import json
import os
import re
from pathlib import Path

from openai import OpenAI

row = json.loads(Path(os.environ["ASYNCRL_ROW_FILE"]).read_text())
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY


def answer_to(text: str) -> str:
    """Return what the model writes behind all of the text so far."""
    return client.completions.create(model="policy", prompt=text).choices[0].text


text = row["prompt"]
answer = answer_to(text)
if asked := re.fullmatch(r"\?(\d+)\+(\d+)", answer):
    total = int(asked[1]) + int(asked[2])
    answer = answer_to(f"{text}{answer}{total}>")

with open(os.environ["ASYNCRL_RESULT"], "w") as file:
    json.dump(float(answer == row["answer"]), file)
