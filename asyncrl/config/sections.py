"""The sections of a config, one frozen model each; `schema` puts them together.

Units are in names (`_s` seconds, `_tokens`, `_groups`, `_gib`). No torch, no vLLM here: reading a config must stay fast.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from asyncrl.config.addresses import one_interface, one_place
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.base import Choice, Mistake, Mistakes, NonNegative, Part, Positive, PositiveFloat, Share


class RunConfig(Part):
    """Which run this is and where it lives."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Names the run directory and the keys in the store."""
    root: Path = Path("runs")
    """Directory that holds the run directories."""
    environment: tuple[str, ...] = ()
    """Variables that the run's processes inherit beside the usual ones, such as a key that a reward needs; `X_*` is a pattern."""
    seed: int = 0
    """Fixes the order of prompts and the initialisation of everything the learner draws."""

    @property
    def directory(self) -> Path:
        """The run directory: config, logs, metrics, samples, checkpoints."""
        return self.root / self.name


class ModelConfig(Part):
    """The policy."""

    path: str
    """A Hugging Face directory or hub name."""
    revision: str | None = None
    """Hub revision; pin it for repeatable runs."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights in generators and of the learner's compute."""
    chat_template: bool = False
    """True: prompts are rendered as chat messages with the tokenizer's template."""
    trust_remote_code: bool = False
    """True runs Python code that comes with the model; read it first."""


class DataConfig(Part):
    """Where prompts come from."""

    train: str
    """JSONL or parquet file, directory or name (`owner/name` or `owner/name:config`) of a Hugging Face dataset."""
    eval: str | None = None
    """Held-out prompts; same formats."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    template: str | None = None
    """Text with {column} placeholders that makes the prompt instead of `prompt_field`."""
    system: str | None = None
    """System message, with `model.chat_template` only."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    eval_split: str = "test"
    """Split of `eval`, where that is a Hugging Face dataset."""
    shuffle: bool = True
    """New order each epoch, fixed by `run.seed`."""


class RewardFunctionConfig(Part):
    """One reward function."""

    function: str
    """`package.module:function`, `path.py:function`, or a built-in: `exact_match`, `arithmetic`, `gsm8k`, `words_used`."""
    weight: float = 1.0
    """Factor of the part in the sum that is trained on."""
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = None
    """Name of the part in metrics; default: the function's."""

    @property
    def part(self) -> str:
        """The name under which the part is reported."""
        return self.name or self.function.rsplit(":", 1)[-1]


class RewardConfig(Part):
    """How rollouts are scored."""

    functions: Annotated[tuple[RewardFunctionConfig, ...], Field(min_length=1, max_length=64)]
    """Parts of the reward; it is their weighted sum."""
    timeout_s: PositiveFloat = 10.0
    """A call that takes longer is killed; the ticket is given back."""
    workers: Positive = 1
    """Reward processes per generator."""
    attempts: Positive = 3
    """A ticket that fails this often is counted dead; it never scores 0."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """`bubblewrap`: for rewards that run what the model wrote. Without network, GPU, and files but the project's and the
    system's; see security.md. Needs `memory_gib` and the program `bwrap`."""
    memory_gib: Annotated[float, Field(ge=0.25)] | None = None
    """Address space of each process of a reward, so that it fails and not the machine. Too little for one that uses a GPU."""

    @model_validator(mode="after")
    def _sandbox_is_bounded(self) -> Self:
        if self.sandbox != "none" and self.memory_gib is None:
            text = "a sandbox needs a memory limit; set reward.memory_gib, 4 is ample for programs of a page"
            raise Mistakes(Mistake(("reward.sandbox",), text))
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [function.part for function in self.functions]
        if len(set(names)) != len(names):
            text = f"reward parts need different names, got {names}; set `name` on one of them"
            raise Mistakes(Mistake(("reward",), text))
        return self


class BatchConfig(Part):
    """What one optimizer step trains on."""

    groups: Positive = 32
    """Groups per optimizer step batch (B)."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts per group (G)."""
    minibatches: Positive = 1
    """Optimizer steps per batch of groups; the policy version counts batches."""
    epochs: Positive = 1
    """Passes over each batch."""

    @property
    def sequences(self) -> int:
        """Rollouts per batch."""
        return self.groups * self.group_size

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.groups % self.minibatches:
            divisors = [n for n in range(1, self.groups + 1) if self.groups % n == 0]
            text = f"groups ({self.groups}) must divide into minibatches ({self.minibatches}); use one of {divisors}"
            raise Mistakes(Mistake(("batch.minibatches", "batch.groups"), text))
        return self


class SamplingConfig(Part):
    """How rollouts are sampled for training."""

    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Of the policy that is trained: generator and learner both use it. vLLM samples at no lower one but 0."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are refused at start, with their row."""
    max_response_tokens: Positive = 512
    """Longer responses are cut off there; `finish_reason` says so."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the model's own end token."""
    top_p: float = 1.0
    """1 only: the learner cannot correct for a truncated distribution."""
    top_k: int = -1
    """-1 or 0 (off) only, for the same reason."""
    min_p: float = 0.0
    """0 only, for the same reason."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        return self.max_prompt_tokens + self.max_response_tokens

    @field_validator("stop")
    @classmethod
    def _stops_at_a_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("sampling.stop holds an empty text, which would end every response before it begins; drop it")
        return stop

    @model_validator(mode="after")
    def _not_truncated(self) -> Self:
        if self.top_p != 1.0 or self.top_k not in (-1, 0) or self.min_p != 0.0:
            text = (
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} truncate the behaviour distribution, which the "
                "learner cannot correct for; training needs top_p=1.0, top_k=-1, min_p=0.0 (shape it with `temperature`)"
            )
            raise Mistakes(Mistake(("sampling.top_p", "sampling.top_k", "sampling.min_p"), text))
        return self


class StalenessConfig(Part):
    """How old a token may be when it is trained."""

    max_lag: NonNegative = 4
    """L: optimizer steps between sampling and training; 0 is synchronous on-policy training."""
    window_groups: Positive | None = None
    """W: younger groups may overtake the oldest unfinished one within this window; default 0.3 (L + 1) B, at L = 0 none."""
    policy: Literal["correct_only", "mask", "drop"] = "correct_only"
    """Tokens older than L, which overtaken answers have: only corrected by importance weights, out of the loss, or their whole
    group rejected. The last two take from long answers."""


class LearnerConfig(Part):
    """The learner's processes."""

    steps: Positive = 100
    """Batches to train on in the whole run."""
    ranks: Positive = 1
    """Processes of the learner, one GPU each; on one host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU. cpu holds for the generators too."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO: what the ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too."""
    tokens_per_microbatch: Positive = 16384
    """Token budget of one packed forward and backward."""
    logprob_chunk_tokens: Positive = 1024
    """Tokens whose logits exist at the same time."""
    gradient_checkpointing: bool = False
    """True saves memory: activations are computed again in the backward pass."""
    threads: Positive | None = None
    """CPU threads per rank; default: cores shared out by the supervisor."""
    optimizer: OptimizerConfig = OptimizerConfig()
    hooks: tuple[Choice, ...] = ()
    """Your own classes, called before and after each step: `path.py:Class`, with keyword arguments beside the name."""


class GeneratorConfig(Part):
    """The generators."""

    count: Positive = 2
    """Started by `asyncrl up`; more may join at any time."""
    tensor_parallel: Positive = 1
    """GPUs per generator; a divisor of the model's attention heads."""
    max_running: Positive = 256
    """Sequences in flight per generator; tickets are leased to fill it."""
    gpu_memory_utilization: Share = 0.85
    """Share of a GPU's memory that vLLM may take: weights, KV cache, activations."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache per generator on CPU."""
    enforce_eager: bool = False
    """True: no CUDA graphs; starts faster, samples slower."""
    threads: Positive | None = None
    """CPU threads per generator; default: cores shared out by the supervisor."""
    recompute_kv: bool = False
    """True: running requests are prefilled again after every weight update."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """A lease that is not renewed this long is issued again."""


class WeightsConfig(Part):
    """Learner to generators."""

    transport: Literal["auto", "gloo", "nccl", "ipc", "disk"] = "auto"
    """auto: nccl where both sides have GPUs, else gloo."""
    deadline_s: PositiveFloat = 60.0
    """A transfer that takes longer is cut off; the sender is killed and respawned."""
    bucket_mib: Positive = 64
    """Parameters are sent in buckets of this size."""
    probe_tokens: Annotated[int, Field(ge=2)] = 32
    """Length of the fixed sequence that both sides score after every update."""
    probe_limit: PositiveFloat = 0.05
    """Largest allowed log-probability difference, generator against learner, on the probe."""


class ControlConfig(Part):
    """The ZMQ control plane."""

    bind: Annotated[str, Field(pattern=r"^tcp://.*:[0-9]+$", examples=["tcp://10.0.0.1:5555"])] | None = None
    """tcp://HOST:PORT for generators on other hosts; default: a socket file in the run directory."""
    heartbeat_s: PositiveFloat = 1.0
    """How often a generator says that it is alive."""
    timeout_s: PositiveFloat = 15.0
    """A generator silent this long is counted dead; its tickets are issued again."""
    stall_s: PositiveFloat = 1800.0
    """The learner stops with an explanation when no group arrives this long."""
    hang_s: Annotated[float, Field(ge=60)] = 300.0
    """A process that makes no progress this long is killed and started again."""
    slow_s: Annotated[float, Field(ge=60)] = 1800.0
    """The same while it starts, loads a model, writes a checkpoint or runs your hooks."""
    max_restarts: NonNegative = 5
    """Restarts of one process within ten minutes before the run stops."""

    @field_validator("bind")
    @classmethod
    def _binds_one_interface(cls, bind: str | None) -> str | None:
        if bind is not None:
            one_place("control.bind", bind)
        return bind


class EvalConfig(Part):
    """Held-out evaluation by the generators while training goes on."""

    every: Positive = 10
    """Optimizer steps between evaluations; needs `data.eval`."""
    prompts: Positive = 128
    """The first so many of `data.eval`, in every round the same."""
    samples: Positive = 1
    """Per prompt; more than one reports pass@k, best@k and mean@k, and maj@k if a reward gives the answer."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy; `samples` above 1 needs more."""


class CheckpointConfig(Part):
    """Saving and resuming."""

    every: Positive = 50
    """Steps between checkpoints; one is always made at the end."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept; groups are forgotten by the store when the oldest kept one holds them. At least two, so that a damaged
    newest one costs steps and no group."""


class TelemetryConfig(Part):
    """Seeing it. JSONL is always written."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline writes files for `wandb sync`."""
    wandb_project: str = "asyncrl"
    """Project there; the run's name is `run.name`."""
    tensorboard: bool = False
    """Event files in RUN/tensorboard; needs asyncrl[tensorboard]."""
    trackio: bool = False
    """Trackio's local database; needs asyncrl[trackio]."""
    trackio_project: str = "asyncrl"
    """Project there; the run's name is `run.name`."""
    trace: bool = True
    """The timeline in RUN/trace_events.json, at most 64 MiB with the one before it."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """/metrics and /health of the learner; generator i has this + 1 + i. 0: any free ones. Default: off."""
    prometheus_host: str = "127.0.0.1"
    """Address that they listen on, of one interface. Whoever reaches it may ask: nobody is asked who they are."""
    samples_per_step: NonNegative = 4
    """Rollouts written to samples.jsonl each step."""

    @field_validator("prometheus_host")
    @classmethod
    def _listens_on_one_interface(cls, host: str) -> str:
        one_interface("telemetry.prometheus_host", host)
        return host
