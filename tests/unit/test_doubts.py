"""What a valid config leaves in doubt: each said by `validate` and what comes after it, and nothing said of
those we ship."""

import json
import os
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.data import dataset
from asyncrl.errors import ConfigError
from asyncrl.hosting import machine
from asyncrl.preflight import doubts as doubt_rules
from asyncrl.preflight.doubts import doubts
from asyncrl.preflight.fit import _require_usable
from asyncrl.preflight.idle_keys import KEYS
from tests.support.model_files import model_files

ROOT = Path(__file__).resolve().parents[2]
OWN = """\
run: {name: mine}
model: {path: owner/model}
data: {train: train.jsonl, eval: test.jsonl}
reward: {functions: [{function: exact_match}]}
sampling: {max_prompt_tokens: 64, max_response_tokens: 64}
"""


MIXED = ("data.train=[{path: train.jsonl}, {path: test.jsonl, weight: 3}]", "data.eval=other.jsonl")
JUDGED = ("reward.functions=[{function: model_score, params: {scorer: judge}}]", "scorers.judge.model=m")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemFree: 0 kB\nMemAvailable: 8 kB\n")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    for name in ("train", "test", "other"):
        write_rows(name, [{"prompt": name, "answer": "2"}])


def write_rows(name: str, rows: list[dict[str, object]]) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def said_of(text: str, *overrides: str) -> list[str]:
    path = Path("run.yaml")
    path.write_text(text)
    return doubts(load_config(path, overrides), path, overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (*MIXED, "algorithm.filters=[zero_variance]", "store.shards=4"),
            "store.shards is 4, and some shards have more tickets of a source of data.train than others: "
            "algorithm.filters change what is trained from the shares of the sources; set store.shards=1, or drop filters",
        ),
        (("data.eval=train.jsonl",), "data.eval is data.train (train.jsonl): the evaluation is not held out"),
        (
            ("data.train=owner/name", "data.template='Q: {question'"),
            "data.template is not a valid template (expected '}' before end of string); set {column} for a column",
        ),
        (("data.eval=null", "eval.every=5"), "eval is set, but data.eval is not: nothing is evaluated"),
        (
            ("algorithm.aggregation={name: seq-mean-token-sum-norm, scale: 512}",),
            "algorithm.aggregation.scale, which divides losses, is 512, but sampling.max_response_tokens is 64",
        ),
        (("learner.device=cuda",), "learner.device is cuda, but this machine shows no GPU"),
        (("learner.optimizer.lr=3.0",), "learner.optimizer.lr is 3, by about which Adam moves every weight"),
        (
            ("learner.steps=4", "learner.optimizer.warmup_steps=5"),
            "learner.optimizer.warmup_steps is 5, but the run has 4 optimizer steps: the rate stays below",
        ),
        (
            ("learner.steps=4", "eval.every=5"),
            "eval.every is 5, but learner.steps is 4: only the first and the last weights are evaluated",
        ),
        (
            ("reward.functions.0.weight=0",),
            "reward.functions.0.weight is 0: every response earns 0, so nothing is learned",
        ),
        (("learner.ranks=512",), "learner.ranks is 512 on 3 cores, so each slows the others"),
        (("generator.count=4",), "generator.count is 4 on 3 cores"),
        (("generator.threads=4",), "generator.threads is 4 on 3 cores"),
        (("learner.threads=4",), "learner.threads is 4 on 3 cores"),
        (
            ("environment.uses=a.py:A", "environment.step_s=9", "environment.episode_s=8"),
            "environment.step_s is 9, but environment.episode_s, which ends the whole episode, is 8",
        ),
        (("learner.optimizer.lr=1e-15",), "learner.optimizer.lr is 1e-15, with which no weight moves"),
        (
            ("sampling.top_k=1",),
            "sampling.top_k is 1, top_p 1 and min_p 0: one token is left, so all answers",
        ),
        (
            ("learner.stop_when={metric: eval/accuracy, reaches: 2}",),
            "learner.stop_when.reaches is 2, but eval/accuracy is at most 1",
        ),
        (
            ("model.lora.sync=merged", "model.dtype=bfloat16"),
            "model.lora.sync is merged, and bfloat16 rounds away what the first steps add to weights",
        ),
        (("weights.probe_limit=100",), "weights.probe_limit is 100 nats, which an engine with wrong weights"),
        (("control.stall_s=5",), "control.stall_s is 5, and a run without a new group for so long ends"),
        (
            ("store.max_gib=33",),
            "store.max_gib is 33, but this machine has 32.0 GiB of memory, and the system ends processes that "
            "want more; set at most 16, with a lower checkpoint.every if it needs more",
        ),
        (("generator.kv_cache_gib=33",), "generator.kv_cache_gib is 33, but this machine has 32.0 GiB"),
        (("eval.prompts=9",), "9 prompts are to be evaluated, but data.eval (test.jsonl) has 1"),
        (
            ("data.eval=[{path: test.jsonl, every: 101}]",),
            "data.eval.0.every is 101, but learner.steps is 100",
        ),
    ],
)
def test_each_doubt_has_a_cause_and_a_cure(overrides: tuple[str, ...], said: str) -> None:
    (line,) = said_of(OWN, *overrides)
    assert line.startswith(said) and any(word in line for word in ("; set ", "; give "))


def test_settings_at_their_limits_are_fine():
    fine = ("learner.steps=5", "eval.every=5", "learner.optimizer.warmup_steps=5", "generator.count=3")
    fine += (
        "store.max_gib=32",
        "generator.kv_cache_gib=32",
        "sampling.temperature=2",
        "learner.threads=3",
        "generator.threads=3",
        "eval.prompts=1",
    )
    assert said_of(OWN, *fine, "learner.optimizer.lr=0.01") == []
    filters = (*MIXED, "algorithm.filters=[zero_variance]")
    assert said_of(OWN, *filters, "store.shards=3", "batch.groups=33") == [], "all shards have equal shares"
    assert said_of(OWN, "learner.steps=2") == [], "the default of eval.every was not chosen"
    elsewhere = ("store.url=unix:///run/store.sock", "store.max_gib=33")
    assert said_of(OWN, *elsewhere) == [], "the memory of another machine"
    two = "reward.functions=[{function: exact_match, weight: 0}, {function: arithmetic}]"
    assert said_of(OWN, two) == [], "a part may be measured only"


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(31)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:1] * 20, "data.train (train.jsonl) has 20 rows, of which 1 are different"),
        (
            lambda rows: [*rows[:6], rows[6] | {"answer": 7}, *rows[7:]],
            "data.train: column `answer` holds text in 30 rows and a number in train.jsonl:7; give",
        ),
        (
            lambda rows: [*rows[:6], rows[6] | {"level": float("nan")}, *rows[7:]],
            "data.train: column `level` is NaN in train.jsonl:7; give it a number",
        ),
        (
            lambda rows: [*rows[:6], rows[6] | {"answer": None}, *rows[7:]],
            "data.train: column `answer` is null in train.jsonl:7; give it a value",
        ),
    ],
)
def test_rows_that_are_unlike_the_others_are_named(change, said):
    write_rows("train", change(ROWS))
    (line,) = said_of(OWN)
    assert line.startswith(said)


def test_of_many_rows_it_is_said_how_many_were_looked_at(monkeypatch):
    monkeypatch.setattr(dataset, "CHECKED", 10)
    write_rows("train", ROWS[:1] * 30)
    (line,) = said_of(OWN)
    assert " has 30 rows, of the 10 that were looked at 1 are different" in line


def test_rows_that_may_be_meant_are_no_doubt():
    write_rows("train", [*ROWS, *ROWS[:7]])
    assert said_of(OWN) == [], "a fifth may be repeated"
    half = [row | {"answer": int(row["answer"])} if row["level"] % 2 else row for row in ROWS]
    write_rows("train", [row | {"extra": None if row["level"] else 2} for row in half])
    assert said_of(OWN) == [], "two types on purpose; a value that is missing; whole numbers and others"
    write_rows("train", [row | {"level": row["level"] / 2} for row in ROWS[:30]] + ROWS[30:])
    assert said_of(OWN) == []


def test_a_model_without_an_end_token_is_named_unless_a_text_ends_responses():
    model_files(Path("model"), eos_token_id=None)
    (line,) = said_of(OWN, "model.path=model")
    assert line.startswith("no file in model names an end token") and "sampling.stop" in line
    assert said_of(OWN, "model.path=model", "sampling.stop=['.']") == []


@pytest.mark.parametrize(
    ("gpus", "overrides", "said"),
    [
        (
            8,
            ("generator.tensor_parallel=3",),
            "no process would use GPU 7 of 8: set learner.ranks=2 (a resumed run keeps its number), or",
        ),
        (8, ("generator.tensor_parallel=4",), "or choose a generator.tensor_parallel that divides 7"),
        (
            8,
            ("learner.ranks=4", "learner.sequence_parallel=4", "generator.tensor_parallel=3"),
            "no process would use GPU 7 of 8: choose a generator.tensor_parallel that divides 4",
        ),
        (4, ("generator.count=2",), "GPU 3 of 4: leave generator.count null, which means 3, or hide"),
        (4, ("generator.count=1",), "GPUs 2, 3 of 4"),
        (
            4,
            ("generator.count=1", *JUDGED, "scorers.judge.gpus=[3]"),
            "GPU 2 of 4: leave generator.count null, which means 2",
        ),
        (
            5,
            ("generator.tensor_parallel=2", *JUDGED, "scorers.judge.gpus=[1]"),
            "4 of 5: choose a generator.tensor_parallel",
        ),
    ],
)
def test_gpus_without_use_are_named_with_the_setting_that_uses_them(monkeypatch, gpus, overrides, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    monkeypatch.setattr(doubt_rules, "build_of", lambda package: "cu130")
    (line,) = said_of(OWN, *overrides)
    assert said in line and line.endswith("with CUDA_VISIBLE_DEVICES")
    assert not [one for one in said_of(OWN, *overrides, "learner.device=cpu") if "no process" in one]


def test_gpus_of_the_learner_alone(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(doubt_rules, "build_of", lambda package: "cu130")
    assert said_of(OWN) == said_of(OWN, *JUDGED, "scorers.judge.gpus=[1]") == []
    path = Path("run.yaml")
    (line,) = doubts(load_config(path), path, (), generators=False)
    assert line.startswith(
        "no process would use GPU 1 of 2: set learner.ranks=2 (a resumed run keeps its number), or hide"
    )


def test_generators_of_other_hosts_use_nothing_of_this_one(monkeypatch) -> None:
    hosts = ("cluster.kind=slurm", "generator.count=4")
    assert said_of(OWN, *hosts) == [], "more than the cores of this host"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(doubt_rules, "build_of", lambda package: "cu130")
    assert said_of(OWN, *hosts) == [], "whether this host has generators is not known"


def test_data_of_ones_own_with_limits_of_an_example() -> None:
    limits = OWN.replace("sampling: {max_prompt_tokens: 64, max_response_tokens: 64}\n", "")
    first, second = said_of("extends: configs/quickstart.yaml\n" + limits)
    assert "sampling.max_prompt_tokens is 8 from " in first and "quickstart.yaml:" in first
    assert "sampling.max_response_tokens is 5" in second and second.endswith("set there what your texts need")
    assert said_of("extends: configs/quickstart.yaml\n" + OWN) == [], "they are one's own"
    assert said_of("extends: configs/quickstart.yaml\nrun: {name: again}\n") == [], "so is nothing"


def test_a_preset_is_found_from_any_directory_and_leaves_no_doubt() -> None:
    for name in ("grpo", "ppo", "dapo"):
        text = f"extends: algorithms/{name}.yaml\n{OWN}"
        assert said_of(text, "sampling.max_response_tokens=512", "sampling.max_prompt_tokens=512") == []
    with pytest.raises(ConfigError, match=r"run.yaml:1  extends: cannot read algorithms/gropo.yaml"):
        said_of(f"extends: algorithms/gropo.yaml\n{OWN}")
    Path("algorithms").mkdir()
    Path("algorithms/grpo.yaml").write_text("batch: {groups: 7}\n")
    Path("run.yaml").write_text(f"extends: algorithms/grpo.yaml\n{OWN}")
    assert load_config(Path("run.yaml")).batch.groups == 7, "a file of one's own comes first"


def test_shaping_that_punishes_every_answer_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"algorithm.shaping.0.buffer_tokens: is 128, not below .*max_response_tokens \(64\).* 12,",
    ):
        said_of(f"extends: algorithms/dapo.yaml\n{OWN}")


def test_a_gpu_that_is_not_there_ends_a_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text(OWN)
    config = load_config(Path("run.yaml"), ["learner.device=cuda"])
    with pytest.raises(ConfigError, match=r"shows no GPU; set learner\.device=auto or cpu"):
        _require_usable(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(doubt_rules, "build_of", lambda package: "cu130")
    _require_usable(config)


GAME, AGENT = "environment.uses=game.py:Game", "environment.command=[python, agent.py]"
TAUGHT = ("algorithm.reference.path=t", "algorithm.advantage=distill")
K8S = ("cluster.kind=kubernetes", "cluster.image=b", "generator.count=1")
UNSCORED = (GAME, "reward.functions=[]")
# Each key with a value, overrides with which it has no effect, and with which it has one.
IDLE = {
    "model.revision=main": (("model.path=model",), ()),
    "model.tool_parser=hermes": ((), (GAME,)),
    "model.reasoning_parser=qwen3": ((), (AGENT,)),
    "data.prompt_field=answer": (("data.template='{prompt}'",), ()),
    "data.last_answer=continue": ((), ("model.chat_template=true",)),
    "data.curriculum.solved=0.5": ((), ("data.curriculum.floor=0.1",)),
    "data.eval_split=other": (("data.eval=null",), ()),
    "reward.timeout_s=3": (UNSCORED, ()),
    "reward.workers=3": (UNSCORED, (GAME,)),
    "reward.sandbox=bubblewrap": ((*UNSCORED, "reward.memory_gib=1"), ("reward.memory_gib=1",)),
    "reward.memory_gib=1": (UNSCORED, ()),
    "environment.address=10.0.0.1": ((GAME,), (AGENT,)),
    "environment.constraints=ignore": ((GAME,), (AGENT,)),
    "environment.frozen=[judge]": ((GAME,), (AGENT,)),
    "environment.workers=3": ((AGENT,), (GAME,)),
    "environment.max_observation_characters=99": ((AGENT,), (GAME,)),
    "environment.history=template": ((GAME,), (GAME, "model.chat_template=true")),
    "algorithm.imitation.solved=0.5": ((), ("algorithm.imitation.coefficient=0.1",)),
    "algorithm.reference.gpus=[1]": (TAUGHT, (*TAUGHT, "algorithm.reference.scorers=1")),
    "cluster.generator_hosts=2": ((), ("cluster.kind=ray", "generator.count=1")),
    "cluster.pending_s=9": ((), ("cluster.kind=ray", "generator.count=1")),
    "cluster.image=a": ((), K8S),
    "cluster.claim=a": ((), K8S),
    "cluster.claim_gib=9": ((), K8S),
    "cluster.sbatch=[--partition=gpu]": ((), ("cluster.kind=slurm", "generator.count=1")),
    "checkpoint.best_is=lowest": ((), ("checkpoint.best=eval/accuracy",)),
    "generator.enforce_eager=true": (("generator.engine=transformers",), ()),
    "generator.kv_cache_gib=1": (("generator.engine=transformers",), ()),
    "store.password_env=SECRET": ((), ("store.url=redis://localhost:1",)),
    "store.insecure=true": ((), ("store.url=redis://localhost:1",)),
    "store.fsync=always": (("store.url=redis://localhost:1",), ()),
    "telemetry.wandb_project=x": ((), ("telemetry.wandb=offline",)),
    "telemetry.prometheus_host=10.0.0.1": ((), ("telemetry.prometheus_port=0",)),
}


@pytest.mark.parametrize("setting", IDLE)
def test_a_key_without_effect_is_named_and_only_then(setting: str) -> None:
    key, without, with_effect = setting.partition("=")[0], *IDLE[setting]
    Path("model").mkdir()
    assert [line for line in said_of(OWN, setting, *without) if line.startswith(f"{key} is ")]
    assert not [line for line in said_of(OWN, setting, *with_effect) if line.startswith(f"{key} is ")]


def test_each_idle_key_is_tried() -> None:
    assert {setting.partition("=")[0] for setting in IDLE} == KEYS.keys()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_what_we_ship_leaves_no_doubt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(doubt_rules, "build_of", lambda package: "cu130")
    assert doubts(load_config(path), path, []) == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer: {total_epochs: 3}", "did you mean `learner`?"),
        (
            "actor_rollout_ref: {}",
            "did you mean `learner` (actor), `generator` (rollout), `algorithm.kl` (ref) and `model`?",
        ),
        ("custom_reward_function: {}", "did you mean `reward.functions`?"),
        ("adv_estimator: grpo", "did you mean `algorithm.advantage`?"),
        ("lora: {r: 8}", "did you mean `model.lora`?"),
        ("critic_lora: true", "a critic trains all its weights; delete it"),
    ],
)
def test_keys_of_verl_and_trl_are_known(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        said_of(f"{OWN}{key}\n")
    assert meant in str(caught.value)


def test_a_curriculum_that_no_reward_solves_is_named():
    floor = "data.curriculum.floor=0.5"
    (said,) = said_of(OWN, floor, "data.curriculum.solved=1.5")
    assert said.startswith("data.curriculum.solved is 1.5, but the reward is at most 1:")
    assert not said_of(OWN, floor, "data.curriculum.solved=1.5", "reward.functions.0.weight=2")
    own = "reward.functions=['reward.py:any']"
    Path("reward.py").write_text("def any(prompt, response): return 9.0")
    assert not said_of(OWN, floor, "data.curriculum.solved=1.5", own)


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/pass@1"])
@pytest.mark.parametrize("key", ["checkpoint.best={}", "learner.stop_when={{metric: {}, patience: 3}}"])
def test_a_metric_of_solved_prompts_that_no_reward_solves_is_named(key, metric):
    chosen, half = key.format(metric), "reward.functions.0.weight=0.5"
    (said,) = said_of(OWN, chosen, half)
    assert f" is {metric}, which counts rewards from 1 on, but the reward is at most 0.5: it stays 0" in said
    assert said.endswith("; set eval/reward_mean, or higher weights")
    assert not said_of(OWN, chosen) and not said_of(OWN, key.format("eval/reward_mean"), half)
    three = "reward.functions=[{function: exact_match, weight: 0.7}, {function: arithmetic, weight: 0.3}]"
    assert not said_of(OWN, chosen, three)


def test_answers_in_the_text_of_prompts_are_named_with_their_share():
    rows = [
        {"prompt": f"{n}: is it {'elephant' if n % 2 else 'a horse'}?", "answer": "elephant"}
        for n in range(8)
    ]
    write_rows("train", rows)
    (said,) = said_of(OWN)
    assert said.startswith(
        "data.train (train.jsonl) has its `answer` in the text of the prompt in 50% of the rows"
    )
    write_rows("train", [row | {"answer": "is"} for row in rows])
    assert not said_of(OWN)
