"""`examples/one_process.ipynb` runs as it stands, cell by cell, where a run of the quick start has been."""

import ast
import asyncio
import inspect
import json
from pathlib import Path

from tests.support.synthetic_run import SyntheticRun

EXAMPLES = Path(__file__).parents[2] / "examples"
CELLS = json.loads((EXAMPLES / "one_process.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_its_output_is_that_of_all_cells_in_order():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream"}
    assert "reward 0.9" in "".join(outputs[0]["text"])


def test_it_runs_to_a_rising_reward_and_opens_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    quickstart = SyntheticRun(tmp_path / "runs" / "quickstart")
    (quickstart.directory / "config.yaml").write_text("run: {name: quickstart}\n", encoding="utf-8")
    for _ in range(20):
        quickstart.advance()
    quickstart.finish()
    names: dict[str, object] = {}

    async def execute() -> None:
        for cell in CODE:
            code = compile("".join(cell["source"]), "a cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if inspect.isawaitable(waiting := eval(code, names)):  # as Jupyter runs a cell
                await waiting

    asyncio.run(execute())
    rewards = names["run"].rewards
    assert sum(rewards[:5]) / 5 < 0.3 < 0.9 < sum(rewards[-5:]) / 5
    printed = capsys.readouterr().out
    assert "did you mean `prompt_field`?" in printed and "learner.steps: found 'many'" in printed
    assert "step  19  reward 0." in printed and "-> '[red]<think>" in printed
