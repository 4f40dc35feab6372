"""Twenty mistakes as people make them, one config after the other and all in one: each is named with its line
and a way out."""

import os
import re
import subprocess
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from asyncrl.cli.app import run as typed
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.errors import ConfigError
from asyncrl.preflight.validate import validated_config
from tests.support.model_files import model_files
from tests.support.models import tiny_qwen2

GOOD = """\
run:
  name: mine
model:
  path: ./model
data:
  train: data/train.jsonl
  eval: data/test.jsonl
  prompt_field: question
reward:
  functions:
    - function: score.py:correct
      weight: 1.0
    - function: score.py:brief
batch:
  groups: 32
  group_size: 8
sampling:
  max_prompt_tokens: 64
  max_response_tokens: 64
staleness:
  max_lag: 4
algorithm:
  advantage: grpo
  kl:
    coefficient: 0.0
learner:
  steps: 100
  optimizer:
    lr: 1e-6
generator:
  count: 2
  lease_s: 60
store:
  max_gib: 4.0
control:
  stall_s: 1800
eval:
  every: 10
checkpoint:
  every: 50
telemetry:
  wandb: off
"""
SCORE = """\
def correct(prompt, response, answer, **columns):
    return float(answer in response)

def brief(prompt, response):
    return 1.0 / (1 + len(response))
"""

MISTAKES = [
    # (what a line says, what somebody wrote, key, what must be said: found or cause, way out)
    ("  groups: 32", "  gropus: 32", "batch.gropus", "did you mean `groups`?"),  # typing
    (
        "  max_prompt_tokens: 64",
        "  max-prompt-tokens: 64",
        "sampling.max-prompt-tokens",
        "did you mean `max_prompt_tokens`?",
    ),
    (
        "  max_response_tokens: 64",
        "  max_new_tokens: 64",
        "sampling.max_new_tokens",
        "did you mean `max_response_tokens`?",
    ),
    (
        "    lr: 1e-6",
        "    learning_rate: 1e-6",
        "learner.optimizer.learning_rate",
        "did you mean `learner.optimizer.lr`?",
    ),
    (
        "  steps: 100",
        "  steps: 1,000",
        "learner.steps",
        "found '1,000'; allowed is a whole number >= 1; correct the value",
    ),
    (
        "  lease_s: 60",
        "  lease_s: 60s",
        "generator.lease_s",
        "found '60s'; allowed is a number >= 1; correct the value",
    ),
    (
        "  max_lag: 4",
        "  max_lag: -1",
        "staleness.max_lag",
        "found -1; allowed is a whole number >= 0; correct the value",
    ),
    (
        "  count: 2",
        "  count: two",
        "generator.count",
        "found 'two'; allowed is a whole number >= 1 or null; correct the value",
    ),
    (
        "  wandb: off",
        "  wandb: yes",
        "telemetry.wandb",
        "allowed is one of off, online, offline; correct the value",
    ),
    ("  advantage: grpo", "  advantage: GRPO", "algorithm.advantage.name", "did you mean `grpo`?"),
    (
        "    coefficient: 0.0",
        "    coefficient: 0.1\n    estimator: k1",
        "algorithm.kl.estimator",
        "set one of them",
    ),
    ("  max_gib: 4.0", "  url: localhost:6379", "store.url", "allowed is text such as redis://HOST:6379/0"),
    (
        "  stall_s: 1800",
        "  bind: 10.0.0.1:5555",
        "control.bind",
        "allowed is text such as tcp://10.0.0.1:5555",
    ),
    ("  eval: data/test.jsonl", "  eval: data/tset.jsonl", "data.eval", "did you mean `data/test.jsonl`?"),
    ("  prompt_field: question", "  prompt_field: quesiton", "data.prompt_field", "did you mean `question`?"),
    (
        "    - function: score.py:correct",
        "    - function: score.py:corect",
        "reward.functions.0.function",
        "did you mean `correct`?",
    ),
    (
        "    - function: score.py:brief",
        "    - function: exact_mach",
        "reward.functions.1.function",
        "did you mean `exact_match`?",
    ),
    ("  path: ./model", "  path: ./modle", "model.path", "did you mean `model`?"),
    ("  every: 50", "  every: 50\n  every: 20", "checkpoint.every", "delete one of them"),
    ("eval:\n  every: 10", "eval:\n  every: 10\n  samples: 4", "eval.samples", "set a temperature"),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / f"data/{name}.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "score.py").write_text(SCORE)
    model_files(tmp_path / "model", max_position_embeddings=128, num_attention_heads=8)
    return tmp_path


def said_of(text: str, *overrides: str) -> list[str]:
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        validated_config(Path("run.yaml"), overrides)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{len(lines)} problem{'s' * (len(lines) != 1)} in run.yaml"
    assert not [line for line in lines if re.search(r"([\w.]+): \1 ", line)], "a key is named twice"
    return lines


def line_of(text: str, wrong: str, key: str) -> int:
    """The line with the last word of the key, or the first of what was written."""
    lines = wrong.splitlines()
    word = key.split(".")[-1]
    inside = max((n for n, line in enumerate(lines) if word in line), default=0)
    return text[: text.index(wrong)].count("\n") + 1 + inside


def test_the_config_without_mistakes_is_fine():
    Path("run.yaml").write_text(GOOD)
    assert validated_config(Path("run.yaml")).batch.groups == 32


def test_generators_of_other_hosts_are_not_judged_by_this_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    wide = ["learner.device=auto", "generator.tensor_parallel=2", "generator.count=1"]
    (line,) = said_of(GOOD, *wide)
    assert "found 2 GPUs per generator, but this machine shows 1 GPU" in line
    validated_config(Path("run.yaml"), [*wide, "cluster.kind=slurm"])


def test_hosts_that_are_elsewhere_are_not_judged_by_the_gpus_of_this_machine(monkeypatch, capsys):
    Path("run.yaml").write_text(GOOD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    for kind in ("ray", "slurm"):
        wide = ["learner.device=auto", "learner.ranks=2", f"cluster.kind={kind}"]
        typed(["validate", "run.yaml", *wide])
        typed(["up", "run.yaml", "--dry-run", *wide])
        assert "learner-0 (2 GPUs): asyncrl learner" in capsys.readouterr().out
        (line,) = said_of(GOOD, *wide)  # on the learner's host
        assert "found 2 ranks, but this machine shows 1 GPU" in line
    monkeypatch.setenv("SLURMD_NODENAME", "n1")  # a node of the job
    with pytest.raises(ConfigError, match="found 2 ranks, but this machine shows 1 GPU"):
        typed(["up", "run.yaml", "--dry-run", *wide])


def test_there_are_twenty():
    assert len({(right, key) for right, _, key, _ in MISTAKES}) == 20


@pytest.mark.parametrize(
    ("right", "wrong", "key", "said"), MISTAKES, ids=[mistake[2] for mistake in MISTAKES]
)
def test_a_mistake_is_named_with_its_line_and_a_way_out(right: str, wrong: str, key: str, said: str):
    assert GOOD.count(right + "\n") == 1
    text = GOOD.replace(right + "\n", wrong + "\n")
    (line,) = said_of(text)
    assert line.startswith(f"  run.yaml:{line_of(text, wrong, key)}  {key}: ") and said in line


def test_a_teacher_is_looked_at_as_the_model_is_and_must_have_its_tokens(tmp_path: Path):
    taught = ("algorithm.advantage=distill", "algorithm.reference.path=./teacher")
    (line,) = said_of(GOOD, *taught)
    assert "algorithm.reference.path: found no ./teacher; give a Hugging Face model directory" in line
    model_files(tmp_path / "teacher", model_type="mamba")
    assert any(
        "algorithm.reference.path: ./teacher is of the architecture mamba" in one
        for one in said_of(GOOD, *taught)
    )
    apart = "algorithm.reference.scorers=1"  # vLLM runs it
    assert "of the architecture" not in str(said_of(GOOD, *taught, apart, "model.path=./modle"))
    again = said_of(GOOD, *taught, apart, "generator.engine=transformers")
    assert "of the architecture mamba" in str(again)
    student = tiny_qwen2(tmp_path / "student", max_position_embeddings=2048)
    teacher = tiny_qwen2(tmp_path / "larger", num_hidden_layers=3, vocab_size=99)
    Path("run.yaml").write_text(GOOD)
    taught = ("algorithm.advantage=distill", f"model.path={student}", f"algorithm.reference.path={teacher}")
    assert validated_config(Path("run.yaml"), taught).reference.path == str(teacher)
    (line,) = said_of(
        GOOD, "algorithm.advantage=distill", f"model.path={teacher}", f"algorithm.reference.path={student}"
    )
    assert f"config.json of {student} has vocab_size 43, less than 99 of {teacher} (model.path)" in line
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"7":', '"8_":'))
    (line,) = said_of(GOOD, *taught)
    assert f"the tokenizer of {teacher} has" in line and f"and that of {student} (model.path) as" in line


def test_a_rule_names_its_key_once_and_an_existing_path_is_not_called_absent():
    for override, said in {
        "batch.group_size=1": "  batch.group_size: is 1, but advantage `grpo` compares",
        "model.path=./model/config.json": "  model.path: found ./model/config.json, which is a file; give",
    }.items():
        (line,) = said_of(GOOD, override)
        assert said in line


@pytest.mark.parametrize(
    ("place", "said"),
    [("/dev/null", "neither file nor directory"), ("./empty", "no data in the directory")],
)
def test_data_that_cannot_be_data_are_named(place: str, said: str):
    Path("empty").mkdir()
    (line,) = said_of(GOOD, f"data.eval={place}")
    assert (
        f"data.eval: found {said}" in line.replace(f"{place}, which is ", "")
        and "give a file of rows" in line
    )


def test_all_twenty_are_told_at_once_each_with_its_line():
    text = GOOD
    for right, wrong, _, _ in MISTAKES:
        text = text.replace(right + "\n", wrong + "\n")
    lines = said_of(text)
    for _, wrong, key, said in MISTAKES:
        assert [
            line
            for line in lines
            if line.startswith(f"  run.yaml:{line_of(text, wrong, key)}  {key}: ") and said in line
        ], key
    assert len(lines) == 20
    numbers = [int(re.findall(r"run\.yaml:(\d+)  ", line)[0]) for line in lines]
    assert numbers == sorted(numbers)


def test_a_missing_need_does_not_hide_other_mistakes():
    text = GOOD.replace("model:\n  path: ./model\n", "").replace("run:\n  name: mine", "run: {}")
    text = text.replace("  train: data/train.jsonl\n", "").replace(
        "- function: score.py:brief", "- weight: 2.0"
    )
    lines = said_of(text, "eval.samples=4", "learner.ranks=999")
    assert any(line.startswith("  run.yaml  model: found nothing") for line in lines)
    for key in (
        "model: ",
        "run.name: ",
        "data.train: ",
        "reward.functions.1.function: ",
        "eval.samples: ",
        "learner.ranks: ",
    ):
        assert len([line for line in lines if f"  {key}" in line]) == 1, (key, lines)
    assert len(lines) == 6


def test_what_hangs_on_a_reported_key_is_not_told():
    text = GOOD.replace("  group_size: 8", "  group_size: one").replace(
        "  advantage: grpo", "  advantage: rloo"
    )
    assert len(said_of(text, "learner.ranks=999")) == 2, "ranks have nothing to do with the key that is wrong"
    assert len(said_of(text.replace("group_size: one", "group_size: 1"))) == 1


def test_a_misspelt_section_is_not_blamed_for_the_defaults_in_its_place():
    # The default lengths are beyond what the model takes.
    (line,) = said_of(GOOD.replace("sampling:", "samplng:"))
    assert "run.yaml:17  samplng: " in line and "did you mean `sampling`?" in line


@pytest.mark.parametrize(
    ("code", "function", "said"),
    [
        (
            "def a(prompt, response, solution):\n  return 0",
            "own.py:a",
            "wants column `solution`, which data/train.jsonl lacks",
        ),
        ("def a(prompt, response, *, soluton):\n  return 0", "own.py:a", "it has question, answer"),
        ("def a(prompt, response, answr):\n  return 0", "own.py:a", "did you mean `answer`?"),
        ("def a(prompt response): return 0", "own.py:a", "own.py:1 is not valid Python"),
        (
            "class a:\n  pass",
            "own.py:a",
            "`a` is a class, and calling it makes an object, not a number; name",
        ),
        ("a = 3", "own.py:b", "found no `b` in own.py; it has no functions"),
        ("", "missing_package.rewards:a", "found no module `missing_package`; install it"),
        (
            "def a(prompt, response):\n  def inner():\n    return 1\n  inner()",
            "own.py:a",
            "`a` has no `return` with a value",
        ),
    ],
)
def test_reward_functions_are_read_not_run(code: str, function: str, said: str):
    Path("own.py").write_text(code)
    (line,) = said_of(GOOD, f"reward.functions.0.function={function}")
    assert said in line and line.startswith("  override `reward.functions.0.function=")


@pytest.mark.parametrize(
    "code",
    [
        "def a(prompt, response, solution=None): return 0",
        "def a(prompt, response, **columns): return 0",
        "from elsewhere import a",
        "from elsewhere import *",
        "import functools\na = functools.partial(print)",
        "@decorated\ndef a(prompt, response, solution): return 0",
        "if True:\n    def a(prompt, response): return 0",
        "class A:\n    def __call__(self, prompt, response): return 0\na = A()",
        "raise SystemExit('this must not run')\nasync def a(prompt, response, answer): return 0",
        "def a(prompt, response):\n  def words():\n    yield from response.split()\n  return float('2' in words())",
        "def a(prompt, response):\n  for one in (1,):\n    if type(one).__name__ == 'int':\n      return 0",
    ],
)
def test_functions_that_may_well_be_there_are_no_mistake(code: str):
    Path("own.py").write_text(code)
    Path("run.yaml").write_text(GOOD)
    assert validated_config(
        Path("run.yaml"), ["reward.functions.0.function=own.py:a", "reward.functions.0.name=a"]
    )


def test_an_editable_install_is_found_by_its_own_finder(monkeypatch):
    Path("src").mkdir()
    Path("src/editable.py").write_text("def a(prompt, response): return 0\nasync def play(session): ...\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return spec_from_file_location(name, "src/editable.py") if name == "editable" else None

    Path("run.yaml").write_text(GOOD)
    own = ["reward.functions=[editable:a]", "learner.hooks=[editable:Hook]"]
    assert "found no module `editable`" in str(said_of(GOOD, *own))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert validated_config(Path("run.yaml"), own).learner.hooks
    assert EnvironmentConfig(uses="editable:play", max_turns=9).sequences == 9


def test_functions_of_the_algorithm_and_hooks_are_looked_for():
    (line,) = said_of(GOOD, "algorithm.policy_loss=own.py:loss")
    assert "algorithm.policy_loss.name: found no own.py" in line
    Path("own.py").write_text("class Look: ...\n")
    (line,) = said_of(GOOD, "learner.hooks=[own.py:Lok]")
    assert "did you mean `Look`?" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{bad\n", "train.jsonl:2: not JSON"),
        ("[1]\n", "train.jsonl:2: found a JSON list"),
        ('"text"\n', "found a JSON str"),
    ],
)
def test_a_first_row_that_is_no_object(content: str, said: str):
    Path("data/train.jsonl").write_text("\n" + content)
    (line,) = said_of(GOOD)
    assert said in line and line.startswith("  run.yaml:6  data.train: ")


@pytest.mark.parametrize(
    "prompt",
    [r'"half \ud83d"', r'[{"role": "user", "content": "\ud83d"}]'],
    ids=["text", "message of a chat"],
)
def test_a_prompt_that_no_tokenizer_takes(prompt: str):
    Path("data/train.jsonl").write_text(f'{{"question": {prompt}, "answer": "a"}}\n')
    found = said_of(GOOD, *(["model.chat_template=true"] if "role" in prompt else []))
    assert any(
        r"train.jsonl:1: the prompt holds \ud83d, half of a character; correct the text" in line
        for line in found
    )


def test_a_section_that_is_wrong_as_a_whole_has_no_second_problem():
    Path("data/train.jsonl").write_text('{"question": "q"}\n')  # without what the default's reward would want
    (line,) = said_of(GOOD.replace("score.py:brief", "score.py:correct"))
    assert "reward.functions: the functions need different names" in line


def test_every_row_is_looked_at_and_named_by_its_line():
    good = '{"question": "q", "answer": "a"}\n'
    rows = [good] * 99 + [
        "\n",
        '{"question": "q"}\n',
        '{"answer": "a"}\n',
        '{"question": "", "answer": "a"}\n',
        good,
    ]
    rows += [
        '{"question": null, "answer": "a"}\n',
        '{"question": 7, "answer": "a"}\n',
        '{"question": [1], "answer": "a"}\n',
    ]
    Path("data/train.jsonl").write_text("".join(rows))
    (line,) = said_of(GOOD)
    assert line.partition("data.train: ")[2].split("; and ") == [
        "1 of 106 rows lack column `answer`, which reward.functions.0.function wants: data/train.jsonl:101; "
        "add it there, or remove the rows",
        "1 of 106 rows lack column `question`, which data.prompt_field wants: data/train.jsonl:102; "
        "add it there, or remove the rows",
        "data/train.jsonl:103: the prompt is empty; remove the row; data/train.jsonl:105: column "
        "`question` holds nothing; allowed is text; write it as text; data/train.jsonl:106: column "
        "`question` holds a int; allowed is text; write it as text (and 1 more)",
    ]


@pytest.mark.parametrize("suffix", [".tsv", ".txt", ".json.gz"])
def test_a_file_of_another_format_is_refused_by_name(suffix: str):
    Path(f"train{suffix}").write_text("question,answer\n1,2\n")
    (line,) = said_of(GOOD, f"data.train=train{suffix}")
    assert (
        f"data.train: train{suffix}: found the suffix `{suffix}`; allowed are .jsonl, .json, .csv, "
        ".parquet, .jsonl.gz, .csv.gz; convert the file" in line
    )


def test_a_pattern_is_looked_at_file_by_file_and_must_match():
    Path("data/part-1.csv").write_text("question,answer\nq,a\n,b\n")
    Path("data/part-2.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": "q"}\n')
    (line,) = said_of(GOOD, "data.train=data/part-*")
    for said in ("data/part-1.csv:3: the prompt is empty", "2 rows lack", "data/part-2.jsonl:2"):
        assert said.replace("2 rows", "1 of 4 rows") in line
    (line,) = said_of(GOOD, "data.train=data/none-*.jsonl")
    assert "data.train: found no file that matches data/none-*.jsonl; give a file of rows, a pattern" in line


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("weight: 0", "data.train.1.weight: found 0; allowed is a number > 0; correct the value"),
        ("weight: -0.5", "data.train.1.weight: found -0.5; allowed is a number > 0; correct the value"),
        (
            "weigth: 1",
            "data.train.1.weigth: found an unknown key; allowed are path, system, filter, map, name, reward,",
        ),
        ("limit: 0", "data.train.1.limit: found 0; allowed is a whole number >= 1 or null"),
        ("path: none.jsonl", "data.train.1: found no none.jsonl"),
        ("path: data/empty.jsonl", "data.train.1: data/empty.jsonl holds no rows; write at least one"),
        ("path: other/train.csv", "the sources have the names train, train, which must differ; set `name`"),
        (
            "system: s",
            "data.train.1.system: is set, but model.chat_template is false; set it to true, or drop",
        ),
        ("name: brief", "data.train.1: brief is also the name of a part of the reward, and both would be"),
    ],
)
def test_a_source_that_cannot_be_mixed_is_named_by_its_number(second: str, said: str):
    Path("data/second.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    Path("data/empty.jsonl").write_text("\n")
    given = f"path: data/second.jsonl, {second}" if "path" not in second else second
    mixed = f"  train:\n    - data/train.jsonl\n    - {{{given}}}\n"
    (line,) = said_of(GOOD.replace("  train: data/train.jsonl\n", mixed))
    assert said in line and line.startswith(("  run.yaml:8  data.train.1", "  run.yaml:6  data.train: "))


def test_the_rows_of_each_source_are_looked_at_up_to_its_limit():
    good = '{"question": "q", "answer": "a"}\n'
    Path("data/second.jsonl").write_text(f'{good}{good}{{"question": "", "answer": "a"}}\n')
    mixed = "  train: [data/train.jsonl, {path: data/second.jsonl, limit: 3}]\n"
    (line,) = said_of(GOOD.replace("  train: data/train.jsonl\n", mixed))
    assert "data.train.1: data/second.jsonl:3: the prompt is empty" in line
    Path("run.yaml").write_text(GOOD.replace("  train: data/train.jsonl\n", mixed.replace("3", "2")))
    validated_config(Path("run.yaml"))
    (line,) = said_of(GOOD, "data.train=[]")
    assert "data.train: found []; allowed is text or a list" in line


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_an_empty_text_is_no_data(key: str):
    (line,) = said_of(GOOD, f"{key}=''")
    assert f"  {key}: found an empty text; give a file of rows" in line


@pytest.mark.parametrize("path", ["~/train.jsonl", "${HOME}/train.jsonl", "$HOME/train.jsonl"])
def test_what_a_shell_would_expand_is_said_not_to_be(path: str):
    (line,) = said_of(GOOD, f"data.train={path}")
    assert f"found no {path}, where ~ and variables are not expanded: write them out" in line


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def correct(response, prompt, answer): ...",
            "takes (response, prompt), but is called with (prompt, response)",
        ),
        ("def correct(response): ...", "takes (response); allowed is (prompt, response, **columns) -> float"),
        (
            "def correct(completions, completion_ids): ...",
            "takes `completion_ids`, which asyncrl does not have",
        ),
        (
            "def correct(completions, level, **kwargs): ...",
            "wants column `level`, which data/train.jsonl lacks",
        ),
        (
            "def correct(data_source, solution_str, ground_truth): ...",
            "wants column `ground_truth`, which data/train.jsonl lacks",
        ),
    ],
)
def test_a_signature_that_cannot_be_called_is_named(source: str, said: str):
    Path("score.py").write_text(f"{source}\ndef brief(prompt, response): ...\n")
    lines = said_of(GOOD)
    assert lines and said in lines[0]
    assert "run.yaml:" in lines[0] and "reward.functions.0.function: " in lines[0]


@pytest.mark.parametrize("batch", ["1", "'64'", "true"])
def test_a_batch_of_a_reward_that_cannot_be_is_named_with_the_other_mistakes(batch: str):
    Path("score.py").write_text(
        SCORE.replace("prompt, response, answer", "prompts, responses, batch=64, answer=1")
    )
    first, second = said_of(GOOD, f"reward.functions.0.params={{batch: {batch}}}", "model.path=./modle")
    found = {"1": "1", "'64'": "'64'", "true": "True"}[batch]
    assert (
        f"reward.functions.0.params: `score.py:correct` has batch={found}; allowed are whole numbers from 2 on"
        in first + second
    )


@pytest.mark.parametrize(
    "source",
    [
        "def correct(completions, **kwargs): ...",
        "def correct(prompts, completions, answer, *, truncated=False, completion_ids=None): ...",
        "def correct(data_source, solution_str, ground_truth=None, extra_info=None): ...",
        "def correct(prompt, response, truncated): ...",
        "def correct(*all, **columns): ...",
        "async def correct(question, completion, /, answer): ...",
    ],
)
def test_a_signature_of_any_known_form_passes(source: str):
    Path("score.py").write_text(f"{source}\ndef brief(prompt, response): ...\n")
    Path("run.yaml").write_text(GOOD)
    validated_config(Path("run.yaml"))


def test_columns_of_a_template_are_looked_for():
    (line,) = said_of(GOOD.replace("  prompt_field: question", "  template: 'Q: {question[0]} {context}'"))
    assert "run.yaml:8  data.template: wants column `context`" in line
    told = "algorithm.reference={template: '{question} {solution}', scorers: 1}"
    lines = said_of(GOOD, "algorithm.advantage=distill", told)
    assert any(
        "algorithm.reference.template: wants column `solution`, which data/train" in one for one in lines
    )
    assert not any("lacks" in one and "data/test" in one for one in lines), "nobody teaches there"
    lines = said_of(GOOD, "algorithm.advantage=distill", told.replace("{solution}", "{"))
    assert any("algorithm.reference.template is not a valid template" in one for one in lines)


def test_rows_of_seeds_are_looked_at_like_a_file():
    made = GOOD.replace("data/train.jsonl", "seeds:20")
    assert made != GOOD
    assert any("which seeds:20 lacks; it has seed" in line for line in said_of(made))
    assert any("found seeds:x; allowed is seeds:N" in line for line in said_of(GOOD, "data.train=seeds:x"))


def test_a_width_in_a_template_that_makes_endless_prompts_is_told_of_once():
    lines = said_of(GOOD.replace("  prompt_field: question", "  template: '{question:>999999999999}'"))
    assert ["width or precision 999999999999, at most 1000 is allowed" in line for line in lines] == [
        True,
        True,
    ], "train, eval"
    assert [line.count("999999999999") for line in lines] == [1, 1]


def test_the_store_must_hold_the_largest_round_of_evaluation_of_the_rows_that_there_are():
    overrides = ["eval.samples=4096", "eval.temperature=1", "store.max_gib=0.5"]
    Path("run.yaml").write_text(GOOD)
    assert validated_config(Path("run.yaml"), overrides)
    Path("data/test.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 200)
    (line,) = said_of(GOOD, *overrides)
    assert f", and {128 * 4096} held-out answers (prompts * samples); a full store would stop the run" in line


@pytest.mark.parametrize("held_out", ["data/test.jsonl", "null"])
def test_the_store_must_hold_the_episodes_of_a_source_with_its_own_environment(held_out: str):
    game = "environment: {command: [agent], max_turns: 64}"
    source = f"data.train=[{{path: 'seeds:100', {game}}}]"
    overrides = [source, f"data.eval={held_out}", "sampling.max_response_tokens=4096", "store.max_gib=2"]
    found = said_of(GOOD, *overrides, "model.path=owner/model", "reward.functions=[odd]")
    (line,) = [line for line in found if "store.max_gib" in line]
    assert f"with {8 * 64} sequences of" in line


def test_held_out_rows_are_looked_at_too():
    Path("data/test.json").write_text('[{"question": "1+1?"}]')
    (line,) = said_of(GOOD, "data.eval=data/test.json")
    assert "reward.functions.0.function: wants column `answer`, which data/test.json lacks" in line
    (line,) = said_of(GOOD, "data.eval=./score.py")
    assert "found the suffix `.py`" in line


HEAVY = (
    "torch",
    "vllm",
    "deepspeed",
    "transformers",
    "redis",
    "zmq",
    "wandb",
    "numpy",
    "psutil",
    "datasets",
    "pyarrow",
    "plotext",
)


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "run.yaml"], ["up", "--help"]])
def test_help_and_validate_import_nothing_heavy(arguments: list[str]):
    Path("run.yaml").write_text(GOOD)
    code = (
        "import sys\nfrom asyncrl.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code, leave.code\n"
        f"print('HEAVY', sorted(set(sys.modules) & set({HEAVY})))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr


ENVIRONMENT = """\
def add(a: int, b: int) -> int:
    "Add."

async def rollout(session): ...
async def alone(session, /, prompt): ...
async def look(what: str) -> str: ...

class Tools:
    def reset(self, answer): ...
    def add(self, a: int, b: int) -> int: ...

class Text(Tools):
    pass

class Steps:
    def reset(self, answer): ...
    def step(self, response): ...

class Any(Steps):
    def reset(*given, level=1, **columns): ...
    async def step(self, response, /, *, level=1): ...

class Wrapped:
    @elsewhere
    def step(self): ...

class Deaf(Steps):
    def step(self): ...

class Greedy:
    async def step(self, response, seed): ...

class Unbound:
    def reset(): ...
    def step(self, response): ...

class Named:
    def step(self, *, text): ...

class Rebound:
    def step(self): ...
    step = elsewhere(step)

class Twice:
    def reset(): ...
    def reset(self): ...
    step = elsewhere

class Changed:
    def step(self): ...

Changed = elsewhere(Changed)
"""


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        ("play.py:Steps", None),
        ("play.py:Any", None),
        ("play.py:Wrapped", None),
        (
            "play.py:Deaf",
            "`step` of `play.py:Deaf` takes (self) in line 28, but is called with (self, text); write `def step(",
        ),
        ("play.py:Greedy", "takes (self, response, seed) in line 31, but is called with (self, text); write"),
        (
            "play.py:Unbound",
            "`reset` of `play.py:Unbound` takes () in line 34, but is called with (self); write",
        ),
        (
            "play.py:Named",
            "takes (self, *, text) in line 38, but is called with (self, text); write `def step(self, text)`",
        ),
        ("play.py:Rebound", None),
        ("play.py:Twice", None),
        ("play.py:Changed", None),
        ("play.py:Text", None),  # its base may have `step`
        ("play.py:rollout", None),
        ("play.py:alone", None),
        ("python", "`python` is a tool, but model.chat_template is false; set it to true, or name a class"),
        ("play.py:add", "`play.py:add` is a tool, but model.chat_template is false"),
        ("play.py:look", "`play.py:look` is a tool, but model.chat_template is false"),
        ("openenv:http://127.0.0.1:8000", None),
        ("gem:game:Guess-v0", None),  # the library may be in the environment's own Python
        ("absent_library:Game", "found no module `absent_library`"),
        ("play.py:Step", "found no `Step` in play.py"),
        ("pley.py:Steps", "did you mean `play.py`?"),
        ("Steps", "found `Steps`; allowed is `path.py:Name`, `module:Name`, `library:NAME`, python"),
        (
            "play.py:Tools",
            "the public methods of `play.py:Tools` are tools, but model.chat_template is false",
        ),
    ],
)
def test_an_environment_must_be_there_and_fit_the_model(uses: str, said: str | None):
    Path("play.py").write_text(ENVIRONMENT)
    if said is None:
        Path("run.yaml").write_text(GOOD)
        validated_config(Path("run.yaml"), [f"environment.uses={uses}"])
        return
    (line,) = said_of(GOOD, f"environment.uses={uses}")
    assert "environment.uses" in line and said in line


def test_a_built_in_tool_may_stand_beside_ones_own():
    Path("play.py").write_text(ENVIRONMENT)
    chat = "model.chat_template=true"  # which this model lacks
    (line,) = said_of(GOOD, chat, "environment.uses=[play.py:add, python]")
    assert "environment.uses" not in line
    assert "found no `sub` in play.py" in str(said_of(GOOD, chat, "environment.uses=[python, play.py:sub]"))


def test_the_program_of_an_agent_must_be_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    command = ["reward.functions=[odd]", "environment.command=[python, agent.py]"]
    found = str(said_of(GOOD, *command))
    assert "environment.command" in found and "found no program `python`" in found
    assert "no program" not in str(said_of(GOOD, *command, f"environment.python={sys.executable}"))


def test_what_the_arguments_of_a_shell_mean_is_left_to_it():
    Path("run.yaml").write_text(GOOD)
    chat = ["model.chat_template=true", "model.path=owner/model"]
    for command in (
        "[bash, -c, 'exec python /there/agent.py']",
        "[env, A=1, python, /there/agent.py]",
        "[python, -um, json.tool]",
        "[python, -mjson.tool, absent]",
        "[python, -Ic, 'pass']",
    ):
        validated_config(Path("run.yaml"), [*chat, f"environment.command={command}"])


def test_the_interpreter_of_programs_must_be_there(monkeypatch):
    def found(interpreter: str) -> str:
        (line,) = said_of(
            GOOD, f"reward.functions=[{{function: code, params: {{interpreter: {interpreter}}}}}]"
        )
        return line

    said = "reward.functions.0.function: `code` needs the interpreter `rubyy`, which is no program on PATH"
    assert said in found("rubyy")
    assert "wants column `tests`" in found("bash")
    monkeypatch.setenv("PATH", "")
    assert "needs the interpreter `bash`" in found("bash") and "wants column `tests`" in found("python")
    Path("run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as refused:  # generators of other hosts need it there
        validated_config(
            Path("run.yaml"),
            ["reward.functions=[{function: code, params: {interpreter: rubyy}}]"],
            generators=False,
        )
    assert "needs the interpreter" not in str(refused.value) and "wants column `tests`" in str(refused.value)


def test_a_module_of_an_environment_with_its_own_python_is_looked_for_there():
    Path("run.yaml").write_text(GOOD)
    validated_config(
        Path("run.yaml"), ["environment.uses=absent_library:Game", f"environment.python={sys.executable}"]
    )


def test_the_config_of_the_quick_start_says_what_makes_its_model_and_rows():
    with pytest.raises(ConfigError) as caught:
        validated_config(Path("configs/quickstart.yaml"))
    for found in ("model.path: found no build/quickstart/model", "quickstart/train.jsonl", "test.jsonl"):
        assert f"{found}, which `asyncrl quickstart` makes; give a" in str(caught.value)


@pytest.mark.parametrize("python", [(), (f"environment.python={sys.executable}",)])
def test_a_file_may_lie_below_a_directory_with_a_colon(python, tmp_path):
    (place := tmp_path / "12:00").mkdir()
    Path("run.yaml").write_text(GOOD)
    (place / "own.py").write_text("def score(prompt, response):\n    return 1.0\n")
    validated_config(Path("run.yaml"), [f"reward.functions=[{{function: '{place}/own.py:score'}}]"])
    assert "has score" in str(said_of(GOOD, f"environment.uses={place}/own.py:Game", *python))


def test_a_file_for_another_python_may_have_its_grammar():
    Path("newer.py").write_text("class Game:\n    x = = 1\n")
    (line,) = said_of(GOOD, "environment.uses=newer.py:Game")
    assert "newer.py:2 is not valid Python" in line
    other = ["environment.uses=newer.py:Game", f"environment.python={sys.executable}"]
    validated_config(Path("run.yaml"), other)
    other[0] = "environment.uses=absent.py:Game"
    assert "absent.py" in str(said_of(GOOD, *other))


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("envs/bin/python", "found no envs/bin/python"),
        ("envs/bin/pithon3", "found no envs/bin/pithon3 (did you mean `envs/bin/python3`?)"),
        ("envs/bin", "found envs/bin, which is a directory"),
        ("envs/bin/python3", "found envs/bin/python3, which is no program"),
    ],
)
def test_the_python_of_an_environment_must_be_there(python, said):
    bin = Path("envs/bin")
    bin.mkdir(parents=True)
    (bin / "python3").touch(mode=0o644)
    if python == "envs/bin/python":
        (bin / "python3").rename("elsewhere")
    game = ["environment.uses=absent_library:Game", f"environment.python={python}"]
    (line,) = said_of(GOOD, *game)
    assert f"environment.python: {said}; give the path of a Python interpreter" in line
    validated_config(Path("run.yaml"), game, generators=False)  # generators are on other machines
    agent = ["reward.functions=[odd]", "environment.command=[python, agent.py]", game[1]]
    assert f"environment.python: {said}" in str(said_of(GOOD, *agent))


def test_rewards_may_name_what_was_played_only_where_something_is_played():
    (Path("score.py")).write_text(SCORE.replace("answer, **columns", "answer, messages, turns, result"))
    Path("play.py").write_text(ENVIRONMENT)
    (line,) = said_of(GOOD)
    assert "reward.functions.0.function: wants column `messages`" in line
    Path("run.yaml").write_text(GOOD)
    validated_config(Path("run.yaml"), ["environment.uses=play.py:Steps"])
