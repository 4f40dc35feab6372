"""Mistakes as people make them in a project of their own, and the words that must name each.

A mistake is made by overrides of the config or by files; `config`, `data`, `reward` and `agent` are its kinds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.model_files import model_files

CONFIG = """\
run: {name: mine}
model: {path: ./model}
data: {train: train.jsonl, eval: test.jsonl}
reward: {functions: [{function: "score.py:right"}]}
sampling: {max_prompt_tokens: 64, max_response_tokens: 64}
learner: {device: cpu, steps: 100}
"""
SCORE = "def right(prompt, response, answer):\n    return float(answer in response)\n"
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(31)]
AT = "url: 'http://h:1/v1'"
JUDGE = f"{AT}, model: m, prompt: "
WITHOUT_REWARD = "reward.functions=[]"
GAME = {"game.py": "class Game:\n    def reset(self): ...\n    def step(self, text): ...\n"}


@dataclass(frozen=True)
class Slip:
    """One mistake: what was done, and what a message must hold."""

    named: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def project(directory: Path) -> None:
    """Write a task without mistakes."""
    model_files(directory / "model", num_attention_heads=4)
    (directory / "task.yaml").write_text(CONFIG)
    (directory / "score.py").write_text(SCORE)
    (directory / "train.jsonl").write_text(lines(ROWS))
    (directory / "test.jsonl").write_text(lines([{"prompt": "9+2=", "answer": "11"}]))


def lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def odd(**values: object) -> str:
    """Rows of which the seventh has other values."""
    return lines([*ROWS[:6], {**ROWS[6], **values}, *ROWS[7:]])


def _keys(*slips: tuple[str, str]) -> dict[str, Slip]:
    """Overrides, each with the words that must be said besides its key."""
    return {one: Slip((one.partition("=")[0].rpartition(".")[2], said), (one,)) for one, said in slips}


def _config(**files: tuple[str, ...]) -> dict[str, Slip]:
    """Whole configs: name -> (text, words ...)."""
    return {name: Slip(tuple(words), files={"task.yaml": text}) for name, (text, *words) in files.items()}


def _data(**slips: tuple[str, ...]) -> dict[str, Slip]:
    """Training data: name -> (text, words ...)."""
    return {name: Slip(tuple(words), files={"train.jsonl": text}) for name, (text, *words) in slips.items()}


def _reward(**slips: tuple[str, ...]) -> dict[str, Slip]:
    """Reward files: name -> (source, words ...)."""
    return {name: Slip(tuple(words), files={"score.py": text}) for name, (text, *words) in slips.items()}


SLIPS: dict[str, dict[str, Slip]] = {
    "config": {
        **_keys(
            ("learner.stepz=5", "did you mean `steps`?"),
            ("learner.Steps=5", "did you mean `steps`?"),
            ("learner.lr=1e-5", "did you mean `learner.optimizer.lr`?"),
            ("learner.learning_rate=1e-5", "did you mean `learner.optimizer.lr`?"),
            ("batch.num_generations=8", "did you mean `batch.group_size`?"),
            ("trainer.total_epochs=3", "did you mean `learner`?"),
            ("lora.r=8", "did you mean `model.lora`?"),
            ("model.lora.r=8", "did you mean `model.lora.rank`?"),
            ("model.lora.lora_alpha=8", "did you mean `model.lora.alpha`?"),
            ("model.lora.lora_dropout=0.1", "an adapter has no dropout here"),
            ("model.load_in_4bit=true", "did you mean `model.lora.load_in_4bit`?"),
            ("model.lora.load_in_4bit=true", "vLLM computes with such weights in bfloat16"),
            ("model.lora.rank=4", "model.lora.rank: found 4; allowed is one of 1, 8, 16"),
            ("generator.vllm.enable_lora=true", "generator.vllm.enable_lora: is refused: set model.lora"),
            ("learner.steps=0", "found 0; allowed is a whole number >= 1"),
            ("learner.steps=1.5", "found 1.5"),
            ("learner.steps=true", "found true"),
            ("learner.steps=ten", "found 'ten'"),
            ("learner.steps=null", "found nothing"),
            ("learner.steps=[5]", "found [5]"),
            ("learner.steps=1e400", "learner.steps"),
            ("learner.optimizer.lr=-1e-6", "found -1e-06"),
            ("learner.optimizer.lr=3.0", "Adam moves every weight"),
            ("learner.optimizer.lr=.nan", "found nan"),
            ("learner.optimizer.schedule=cosin", "did you mean `cosine`?"),
            ("learner.optimizer.kind=sgd", "one of adamw, adamw_8bit, muon, adafactor"),
            ("learner.optimizer.kind=adamw_8bit", "pip install 'asyncrl[bitsandbytes]'"),
            ("learner.optimizer.schedule=warmup_stable_decay", "num_decay_steps"),
            ("learner.optimizer.warmup_steps=1.5", "found 1.5"),
            ("learner.optimizer.warmup_steps=1000", "the run has 100 optimizer steps"),
            ("learner.device=gpu", "one of"),
            ("learner.device=cuda", "this machine shows no GPU"),
            ("learner.ranks=0", "found 0"),
            ("learner.ranks=999", "fewer ranks"),
            ("learner.ranks=64", "each slows the others"),
            ("learner.sequence_parallel=2", "learner.ranks"),
            ("learner.offload_optimizer=true", "drop"),
            ("learner.tokens_per_microbatch=10", "less than the longest sequence"),
            ("learner.zero_stage=4", "found 4"),
            ("learner.hooks=[look.py:Look]", "found no look.py"),
            ("generator.engine=sglang", "one of vllm, transformers"),
            ("generator.count=-1", "found -1"),
            ("generator.count=200", "each slows the others"),
            ("generator.tensor_parallel=3", "attention heads"),
            ("generator.gpu_memory_utilization=90", "found 90"),
            ("generator.vllm={max_num_batchd_tokens: 5}", "did you mean"),
            ("generator.lease_s=0.1", "found 0.1"),
            ("batch.group_size=1", "compares rollouts of one group"),
            ("batch.group_size=one", "found 'one'"),
            ("batch.groups=7 8", "found '7 8'"),
            ("batch.minibatches=10000", "must divide into minibatches"),
            ("staleness.max_lag=-1", "found -1"),
            ("staleness.max_lag=none", "found 'none'"),
            ("staleness.window_groups=0", "found 0"),
            ("sampling.top_p=0.9", "without top_k may leave any number"),
            ("sampling.temperature=0", "found 0"),
            ("sampling.stop=['']", "empty text"),
            ("sampling.max_tokens=5", "did you mean"),
            ("algorithm.advantage=GRPO", "did you mean `grpo`?"),
            ("algorithm.advantage=gropo", "did you mean `grpo`?"),
            ("algorithm.policy_loss=mine.py:loss", "found no mine.py"),
            ("algorithm.kl.estimator=k1", "algorithm.kl.coefficient is 0"),
            ("model.revision=main", "which has one revision"),
            ("model.reasoning_parser=qwen3", "only episodes are read with it"),
            ("store.insecure=true", "store.url is not set"),
            ("telemetry.wandb_project=x", "telemetry.wandb is off"),
            ("telemetry.prometheus_host=10.0.0.1", "nothing listens"),
            ("algorithm.aggregation={name: seq-mean-token-sum-norm, scale: 512}", "set scale to 64"),
            ("eval.samples=4", "all would be equal"),
            ("eval.samples=1000000", "a whole number from 1 to 4096"),
            ("eval.every=1000", "only the first and the last weights"),
            ("checkpoint.keep=1", "found 1"),
            ("checkpoint.best=accuracy", "found 'accuracy'"),
            ("checkpoint.best=eval/acuracy", "did you mean `eval/accuracy`?"),
            ("learner.stop_when={metric: eval/accuracy}", "found neither reaches nor patience"),
            ("store.url=localhost:6379", "redis://HOST:6379"),
            ("store.max_gib=0.0001", "can be open"),
            ("store.max_gib=1000000", "ends processes that want more"),
            ("generator.kv_cache_gib=1000000", "ends processes that want more"),
            ("store.shards=5", "does not divide"),
            ("control.bind=10.0.0.1:5555", "tcp://10.0.0.1:5555"),
            ("control.hang_s=10", "found 10"),
            ("control.timeout_s=1", "heartbeat"),
            ("weights.transport=tcp", "control.bind"),
            ("telemetry.wandb=true", "off, online, offline"),
            ("telemetry.prometheus_port=65535", "need ports up to 65537"),
            ("model.dtype=float16", "one of float32, bfloat16"),
            ("model.path=./modle", "did you mean `model`?"),
            ("model.path=MODEL/", "did you mean `model`?"),
            ("model.path=./model/config.json", "which is a file"),
            ("model.chat_template=true", "has no template"),
            ("data.system=Hello", "model.chat_template is false"),
            ("run.name=a/b", "matching"),
            ("run.seed=one", "found 'one'"),
            ("run.seed=-1", "found -1; allowed is a whole number >= 0"),
            ("run.seed=99999999999999999999", "the last number that the store counts exactly"),
            ("run.name=..", "found '..'"),
            ("model.path=https://huggingface.co/Qwen/Qwen3-0.6B", "give"),
            ("model.path=$HOME/model", "write them out"),
            ("model.path=[a]", "found ['a']"),
            ("model.dtype=bf16", "one of float32, bfloat16"),
            ("model.torch_dtype=bfloat16", "did you mean"),
            ("model.lora=16", "a section"),
            ("model.lora={targets: [q_prj]}", "q_prj"),
            ("model.lora={start: ./none}", "none"),
            ("model.trust_remote_code=maybe", "true or false"),
            ("batch.groups=-4", "found -4"),
            ("batch.groups=99999999", "can be open"),
            ("batch.group_size=5000", "found 5000"),
            ("batch.epochs=0", "found 0"),
            ("batch.batch_size=8", "unknown key"),
            ("batch=8", "a section with groups"),
            ("staleness.max_lag=100000", "can be open"),
            ("staleness.policy=masked", "did you mean `mask`?"),
            ("learner.threads=1000", "set at most"),
            ("generator.threads=500", "set at most"),
            ("learner.optimizer=adam", "a section"),
            ("learner.optimizer.betas=[0.9]", "betas"),
            ("learner.optimizer.betas=[0.9, 1.0]", "found 1.0; allowed is a number >= 0 < 1"),
            ("learner.optimizer.lr=1e-15", "no weight moves"),
            ("learner.optimizer.lr=1e6", "that destroys a model"),
            ("learner.gradient_accumulation_steps=4", "unknown key"),
            ("learner.device=cuda:0", "one of"),
            ("learner.stop_when={metric: eval/accuracy, reaches: 2}", "is at most 1"),
            ("learner.stop_when=0.9", "a section"),
            ("sampling.temperature=100", "at most 2"),
            ("sampling.temperature=-1", "found -1"),
            ("sampling.max_response_tokens=100000", "learner.tokens_per_microbatch"),
            ("sampling.top_k=1", "one token is left"),
            ("sampling.min_p=2", "found 2"),
            ("sampling.repetition_penalty=1.1", "unknown key"),
            ("sampling.seed=3", "run.seed"),
            ("algorithm=grpo", "a section"),
            ("algorithm.name=grpo", "unknown key"),
            ("algorithm.preset=dapo", "unknown key"),
            ("algorithm.kl=0.1", "a section"),
            ("algorithm.kl.beta=0.1", "did you mean"),
            ("algorithm.kl.coefficient=-0.1", "found -0.1"),
            ("algorithm.entropy.coefficient=big", "found 'big'"),
            ("algorithm.correction.cap=0", "it must be a number > 0"),
            ("algorithm.advantage={name: grpo, scale: foo}", "one of group, batch, none"),
            ("algorithm.policy_loss={name: ppo_clip, clip: 0.2}", "no parameter `clip`"),
            ("algorithm.policy_loss={name: ppo_clip, clip_low: 2}", "a number from 0 to 1"),
            ("algorithm.policy_loss=dpo", "dpo"),
            ("algorithm.aggregation=mean", "known are"),
            ("algorithm.filters=zero_variance", "a list"),
            ("eval.prompts=1000", "1000 prompts are to be evaluated"),
            ("eval.temprature=1", "did you mean `temperature`?"),
            ("eval.every=0", "found 0"),
            ("checkpoint.hub.repo=model", "found 'model'"),
            ("checkpoint.dir=/x", "unknown key"),
            ("store.url=unix://", "found 'unix://'"),
            ("store.url=redis://h:99999/0", "Port out of range"),
            ("store.url=redis://user:pw@h:1/0", "holds a password"),
            ("store.url=redis://[::1:1/0", "Invalid IPv6 URL"),
            ("store.bind=0.0.0.0", "found '0.0.0.0'"),
            ("control.bind=tcp://0.0.0.0:5555", "would listen on every interface"),
            ("control.bind=tcp://10.0.0.1:99999", "allowed is 1 to 65535"),
            ("control.stall_s=5", "as while engines start"),
            ("control.heartbeat_s=100", "a shorter heartbeat"),
            ("weights.transport=ipc", "one of auto, slot"),
            ("weights.probe_limit=100", "an engine with wrong weights"),
            ("weights.probe_tokens=100000", "found 100000"),
            ("cluster.kind=k8s", "found 'k8s'"),
            ("cluster.image=x", "cluster.kind is not kubernetes"),
            ("cluster.generator_hosts=2", "cluster.kind is null"),
            ("cluster.learner_hosts=3", "cluster.kind is not set"),
            ("cluster.sbatch=['--partition=gpu']", "cluster.kind is not slurm"),
            ("cluster.sbatch=[partition=gpu]", "found 'partition=gpu'"),
            ("telemetry.log_level=debug", "unknown key"),
            ("telemetry.samples_per_step=-1", "found -1"),
            ("telemetry.prometheus_port=9100x", "found '9100x'"),
            ("generator.count=0", "found 0"),
            ("generator.gpu_memory_utilization=0", "found 0; allowed is a number > 0 <= 1"),
            ("generator.max_num_seqs=5", "unknown key"),
            ("generator.vllm={max_model_len: 10}", "max_model_len"),
            ("generator.vllm={model: x}", "model.path"),
            ("learner.steps==5", "found '=5'"),
            ("learner..steps=5", "learner..steps"),
            ("LEARNER.steps=5", "did you mean `learner`?"),
            ("learner/steps=5", "found no `key.path=value`"),
            ("reward.functions.-1.weight=2", "found a section with -1"),
            ("learner.steps='${STEPS}'", "found '${STEPS}'"),
        ),
        **_config(
            toml=('[run]\nname = "mine"\n', "task.yaml", "is TOML", "write a table"),
            toml_keys=('name = "mine"\nsteps = 3\n', "task.yaml", "is TOML"),
            tabs=("run:\n\tname: mine\n", "task.yaml:2", "not tabs"),
            colon=("run: {name: mine}\nmodel: path: x\n", "task.yaml:2", "in quotes"),
            bracket=("run: {name: mine\nmodel: {path: x}\n", "task.yaml", "brackets"),
            json_list=("[]\n", "task.yaml:1", "no section"),
            twice=(CONFIG + "run: {name: again}\n", "task.yaml:7", "twice", "delete one"),
            section=(CONFIG.replace("sampling:", "samplng:"), "task.yaml:5", "did you mean `sampling`?"),
            nothing=(CONFIG.replace("run: {name: mine}\n", ""), "run: found nothing", "add"),
            text=(CONFIG.replace("{path: ./model}", "./model"), "model: found './model'", "section"),
            extends=("extends: none.yaml\n" + CONFIG, "task.yaml:1", "cannot read none.yaml"),
            two_documents=(CONFIG + "---\nrun: {name: b}\n", "task.yaml:7", "another document"),
            alias=(CONFIG + "eval: *x\n", "task.yaml:7", "undefined alias"),
            indentation=(CONFIG + "eval:\n every: 5\n   prompts: 3\n", "task.yaml:9", "indentation"),
            no_colon=(CONFIG + "eval\n", "task.yaml", "is not YAML"),
            comment=("# nothing\n", "task.yaml:1", "found nothing"),
            web_page=("<html>\n", "task.yaml:1", "found no section"),
            hydra=("defaults:\n  - a\n" + CONFIG, "task.yaml:1", "defaults"),
            number_key=(CONFIG + "1: 3\n", "task.yaml:7", "1"),
            equals=(CONFIG + "eval:\n  every=5\n", "task.yaml", "eval"),
            percent=(CONFIG + "eval: {every: 10%}\n", "task.yaml:7", "found '10%'"),
            circle=("extends: task.yaml\n" + CONFIG, "extends itself", "remove one"),
        ),
    },
    "data": {
        **_data(
            empty=("", "train.jsonl holds no rows", "at least one"),
            csv=("prompt,answer\n1+1=,2\n", "train.jsonl:1", "one JSON object"),
            broken=(lines(ROWS[:2]) + '{"prompt": 1+1=}\n', "train.jsonl:3", "not JSON"),
            twice=(
                '{"prompt": "1+1=", "answer": "3", "answer": "2"}\n',
                "train.jsonl:1",
                "`answer` twice in",
            ),
            twice_inside=(
                lines(ROWS) + '{"prompt": "1", "answer": [{"a": 1, "a": 1}]}\n',
                "train.jsonl:32",
                "`a` twice in",
            ),
            array=(json.dumps(ROWS), "train.jsonl:1", "a row is an object"),
            half=(lines(ROWS)[:-20], "train.jsonl:31", "not JSON"),
            latin=('{"prompt": "caf\\udce9"}\n', "train.jsonl:1", "half of a character"),
            no_answer=(lines([{"prompt": "1+1="}]), "wants column `answer`", "it has prompt"),
            capital=(lines([{"prompt": "1", "Answer": "2"}]), "column `answer`", "did you mean `Answer`?"),
            question=(lines([{"question": "1", "answer": "2"}]), "column `prompt`", "name another"),
            lacks=(odd() + '{"prompt": "1"}\n', "train.jsonl:32", "lack column `answer`", "remove the rows"),
            empty_prompt=(odd(prompt=" "), "train.jsonl:7", "prompt is empty", "remove the row"),
            null_prompt=(odd(prompt=None), "train.jsonl:7", "holds nothing"),
            number_prompt=(odd(prompt=7), "train.jsonl:7", "allowed is text"),
            messages=(odd(prompt=[{"role": "user", "content": "a"}]), "set model.chat_template: true"),
            number_answer=(odd(answer=12), "train.jsonl:7", "`answer` holds text in 30 rows and a number"),
            list_answer=(odd(answer=["12"]), "train.jsonl:7", "a list", "one type"),
            nan=(odd(level=float("nan")), "train.jsonl:7", "`level` is NaN", "give it a number"),
            trailing_comma=(lines(ROWS).replace("}\n", "},\n"), "train.jsonl:1", "not JSON"),
            single_quotes=("{'prompt': '1', 'answer': '2'}\n", "train.jsonl:1", "not JSON"),
            null_rows=("null\n", "train.jsonl:1", "an object"),
            blank=("\n\n\n", "train.jsonl holds no rows"),
            pretty=(json.dumps(ROWS[0], indent=1), "train.jsonl:1", "one JSON object"),
            deep=(lines(ROWS[:3]) + '{"answer": ' + "[" * 5000, "train.jsonl:4", "correct"),
            spaces=(lines([{"prompt ": "1", "answer": "2"}]), "column `prompt`", "did you mean"),
            yaml=("- prompt: a\n", "train.jsonl:1", "one JSON object"),
            null_answer=(odd(answer=None), "train.jsonl:7", "`answer` is null"),
            null_answers=(lines([{**row, "answer": None} for row in ROWS]), "`answer` is null or empty in"),
            empty_answers=(lines([{**row, "answer": ""} for row in ROWS]), "`answer` is null or empty in"),
            infinite=(odd(level=float("inf")), "train.jsonl:7", "`level` is infinite"),
            dict_prompt=(odd(prompt={"a": 1}), "train.jsonl:7", "allowed is text"),
            equal=(lines(ROWS[:1] * 20), "20 rows, of which 1 are different", "remove the repetitions"),
        ),
        **_keys(
            ("data.train=tain.jsonl", "did you mean `train.jsonl`?"),
            ("data.train=TRAIN.jsonl", "did you mean `train.jsonl`?"),
            ("data.train=score.py", "`.py`; allowed are .jsonl"),
            ("data.train=~/train.jsonl", "not expanded"),
            ("data.train=./nothing/", "found no ./nothing"),
            ("data.train=seeds:x", "allowed is seeds:N"),
            ("data.train=seeds:0", "allowed is seeds:N"),
            ("data.eval=train.jsonl", "is not held out"),
            ("data.eval=./eval.jsonl", "found no ./eval.jsonl"),
            ("data.split='train[:10]'", "has no splits"),
            ("data.eval_split=validation", "has no splits"),
            ("model.chat_template=chat.jinja", "cannot be read (No such file"),
            ("data.prompt_field=promt", "did you mean `prompt`?"),
            ("data.prompt_field=''", "column ``"),
            ("data.train=[train.jsonl, none.jsonl]", "found no none.jsonl"),
            ("data.train=[{path: train.jsonl, weight: 0}]", "found 0"),
            ("data.train=[{path: train.jsonl, reward: [score.py:wrong]}]", "found no `wrong`"),
            ("data.train=[]", "found []"),
            ("data.train='data/*.jsonl'", "found no file that matches"),
            ("data.train=https://h/x.jsonl", "found no https"),
            ("data.eval=[{path: test.jsonl, limit: 500}]", "500 prompts are to be evaluated"),
            ("data.eval=[{path: test.jsonl, samples: 1000000}]", "from 1 to 4096"),
            ("data.eval=[{path: test.jsonl, every: 1000}]", "only the first and the last weights"),
            ("data.map=none.py:f", "found no none.py"),
            ("data.images_key=image", "model.chat_template"),
            ("data.curriculum.floor=2", "found 2"),
            ("data.long_prompts=drp", "did you mean `drop`?"),
            ("data.template='What is it?'", "names no column"),
            ("data.template='{}'", "not a valid template"),
            ("data.template='Q: {promt}'", "did you mean `prompt`?"),
            ("data.template='Q: {prompt'", "not a valid template"),
        ),
        "chat without a template": Slip(
            ("model.chat_template: is true", "has no template"),
            ("model.chat_template=true",),
            {"train.jsonl": odd(prompt=[{"role": "user", "content": "a"}])},
        ),
        "ShareGPT": Slip(
            ("train.jsonl:7", "found a message from `robot`"),
            ("model.chat_template=true",),
            {
                "train.jsonl": odd(prompt=[{"from": "robot", "value": "a"}]),
                "model/chat_template.jinja": "{{ messages[0].content }}",
            },
        ),
        "eval without its columns": Slip(("test.jsonl", "answer"), files={"test.jsonl": '{"prompt": "a"}\n'}),
    },
    "reward": {
        **_keys(
            ("reward.functions=[]", "nothing scores a response"),
            ("reward.functions=[task.py:f]", "found no task.py"),
            ("reward.functions=[{weight: 1}]", "found nothing"),
            ("reward.functions=score.py:right", "a list"),
            ("reward.functions.0.function=score.py:rihgt", "did you mean `right`?"),
            ("reward.functions.0.function=Score.py:right", "did you mean `score.py`?"),
            ("reward.functions.0.function=score:rigth", "did you mean `right`?"),
            ("reward.functions.0.function=scores/one:right", "write `scores/one.py:right`"),
            ("reward.functions.0.function=nowhere.rewards:f", "found no module `nowhere`"),
            ("reward.functions.0.function=Exact_Match", "did you mean `exact_match`?"),
            ("reward.functions.0.function=accuracy", "found no built-in `accuracy`"),
            ("reward.functions.0.weight=0", "every response earns 0"),
            ("reward.functions.0.weight=high", "found 'high'"),
            ("reward.functions.1.function=gsm8k", "found no such item"),
            ("reward.functions.0.params={url: a}", "takes no params"),
            ("reward.functions=[{function: http_reward}]", "needs `url`"),
            ("reward.functions=[{function: http_rewrad, params: {}}]", "did you mean `http_reward`?"),
            ("reward.functions=[{function: http_reward, params: {url: 'localhost:1'}}]", "http://HOST:PORT"),
            ("reward.functions=[{function: http_reward, params: {url: 'http://me:pw@h/'}}]", "without user"),
            ("reward.functions=[{function: http_reward, params: {ulr: x}}]", "did you mean `url`?"),
            (f"reward.functions=[{{function: http_reward, params: {{{AT}, key_env: A_KEY}}}}]", "A_KEY"),
            (f"reward.functions=[{{function: http_reward, params: {{{AT}, key_env: sk-1}}}}]", "such as"),
            (
                f"reward.functions=[{{function: llm_judge, params: {{{AT}, prompt: a.jinja}}}}]",
                "needs `model`",
            ),
            (
                f"reward.functions=[{{function: llm_judge, params: {{{JUDGE}a.jinja}}}}]",
                "cannot read a.jinja",
            ),
            (
                f"reward.functions=[{{function: llm_judge, params: {{{JUDGE}a, pattern: a}}}}]",
                "needs a group",
            ),
            (f"reward.functions=[{{function: llm_judge, params: {{{JUDGE}a, votes: 0}}}}]", ">= 1"),
            ("reward.timeout_s=0", "found 0"),
            ("reward.attempts=0", "found 0"),
            ("reward.memory_gib=0", "found 0"),
            ("reward.function=score.py:right", "did you mean `functions`?"),
            ("reward.functions.0.weight=.nan", "found nan"),
            ("reward.functions.0.name='a b'", "found 'a b'"),
            ("reward.functions.0.function=score.py", "name your own"),
            ("reward.functions.0.function=score.py:", "score.py"),
            ("reward.functions.0.function='score.py:right()'", "did you mean `right`?"),
            ("reward.functions.0.function=score.py:right:x", "found two colons"),
            ("reward.functions.0.function=~/score.py:right", "write them out"),
            ("reward.functions=[{function: code}]", "wants column `tests`"),
            ("reward.workers=0", "found 0"),
            ("reward.workers=10000", "a whole number from 1 to 1024"),
            ("reward.sandbox=docker", "one of"),
        ),
        **_reward(
            swapped=("def right(response, prompt): ...", "(response, prompt)", "swap the two"),
            alone=("def right(response): ...", "takes (response)", "take prompt and response first"),
            none=("def wrong(prompt, response): ...", "found no `right` in score.py", "it has wrong"),
            a_class=("class right:\n    pass\n", "`right` is a class", "name a function"),
            syntax=(
                "def right(prompt, response)\n    return 0\n",
                "score.py:1 is not valid Python",
                "correct",
            ),
            column=(
                "def right(prompt, response, solution): ...",
                "wants column `solution`",
                "prompt, answer",
            ),
            method=("class A:\n    def right(self, prompt, response): ...\n", "found no `right`", "it has A"),
            nested=(
                "def outer():\n    def right(prompt, response): ...\n",
                "found no `right`",
                "it has outer",
            ),
            script=("if __name__ == '__main__':\n    def right(prompt, response): ...\n", "found no `right`"),
            constant=("right = None\n", "`right` is None in score.py:1", "name a function"),
            generator=(
                "def right(prompt, response):\n    yield 1\n",
                "makes a generator",
                "return the number",
            ),
            no_return=("def right(prompt, response):\n    1.0\n", "has no `return` with a value"),
            absent=(
                "import nowhere.near\ndef right(prompt, response): return 1\n",
                "score.py:1 imports `nowhere`",
                "install it",
            ),
            python_2=("def right(prompt, response):\n    print 'x'\n", "score.py:2 is not valid Python"),
            unfinished=("def right(prompt, response)\n", "score.py:1 is not valid Python"),
            notebook=('{"cells": []}\n', "found no `right` in score.py", "it has no functions"),
            of_itself=("def right(self, prompt, response): return 1\n", "takes (self, prompt)"),
            trl=("def right(completions, completion_ids): ...", "`completion_ids`", "default"),
            verl=("def right(data_source, solution_str, ground_truth): ...", "`ground_truth`", "add it"),
        ),
        "two of a name": Slip(
            ("need different names",),
            ("reward.functions=[{function: exact_match}, {function: exact_match}]",),
        ),
    },
    "agent": {
        name: Slip(named, (WITHOUT_REWARD, *overrides), files)
        for name, named, overrides, files in (
            ("text", ("environment.command", "a list"), ("environment.command='python my_agent.py'",), {}),
            (
                "no script",
                ("found no agent.py", "give the path of the script"),
                ("environment.command=[python, agent.py]",),
                {},
            ),
            (
                "similar script",
                ("did you mean `My_agent.py`?",),
                ("environment.command=[python, my_agent.py]",),
                {"My_agent.py": ""},
            ),
            (
                "no program",
                ("found no program `pyhton`", "name on PATH"),
                ("environment.command=[pyhton, score.py]",),
                {},
            ),
            *(
                (words, (found,), (f"environment.command={words}",), {})
                for words, found in {
                    "[]": "nothing scores",
                    "['']": "environment.command",
                    "['python score.py']": "found no program `python score.py`",
                    "[python]": "found python without a script",
                    "[python, -c]": "found python without a script",
                    "[python, -W, ignore, score.pyy]": "did you mean `score.py`?",
                    "[python, -m, nowhere.near]": "found no module `nowhere`",
                    "[python, -um, nowhere.near]": "found no module `nowhere`",
                    "[5]": "found 5",
                }.items()
            ),
            *(
                (setting, (said,), ("environment.uses=game.py:Game", f"environment.{setting}"), GAME)
                for setting, said in {
                    "max_turns=0": "found 0",
                    "step_s=1000": "which ends the whole episode, is 600",
                    "weight=.nan": "found nan",
                    "address=10.0.0.1": "only agents",
                    "replays=-1": "found -1",
                    "memory_gib=0.1": "found 0.1",
                    "history=exat": "did you mean `exact`?",
                    "constraints=allow": "one of refuse, ignore",
                    "max_turn=3": "did you mean `max_turns`?",
                    "episodes_per_slot=0": "found 0",
                    "workers=10000": "found 10000",
                    "python=python9": "found no python9",
                }.items()
            ),
            *(
                (code, (said,), ("environment.uses=game.py:Game",), {"game.py": code})
                for code, said in {
                    "class Game\n": "game.py:1 is not valid Python",
                    "Game = 5\n": "`Game` is 5 in game.py:1",
                    "import nowhere\nclass Game:\n    def step(self, text): ...\n": "imports `nowhere`",
                    "class Games:\n    def step(self, text): ...\n": "did you mean `Games`?",
                    "class Game:\n    def step(self): ...\n": "write `def step(self, text)`",
                    "class Game:\n    def reset(): ...\n    def step(self, text): ...\n": "(self)",
                }.items()
            ),
            (
                "both",
                ("both set", "drop one"),
                ("environment.command=[python, score.py]", "environment.uses=score.py:Game"),
                {"score.py": "class Game:\n    def step(self): ...\n"},
            ),
            ("no class", ("found no `Game` in score.py", "right"), ("environment.uses=score.py:Game",), {}),
            ("no file", ("found no game.py", "give `path.py:Game`"), ("environment.uses=game.py:Game",), {}),
            ("no colon", ("found `game`", "path.py:Name"), ("environment.uses=game",), {}),
            (
                "tools without chat",
                ("are tools, but model.chat_template is false", "add a method `step`"),
                ("environment.uses=score.py:Game",),
                {"score.py": "class Game:\n    def reset(self): ...\n    def look(self): ...\n"},
            ),
            (
                "unused",
                ("environment.max_turns: is set", "name the environment"),
                ("environment.max_turns=3", "reward.functions=[{function: exact_match}]"),
                {},
            ),
            (
                "no interpreter",
                ("environment.python", "found no", "interpreter"),
                ("environment.command=[python, score.py]", "environment.python=./venv/bin/python"),
                {},
            ),
            (
                "weight 0",
                ("environment.weight is 0", "nothing is learned"),
                ("environment.command=[python, score.py]", "environment.weight=0"),
                {},
            ),
        )
    },
}
