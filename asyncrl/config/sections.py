"""The sections of a config, one frozen model each; `schema` puts them together. Names carry units."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, WithJsonSchema, field_validator

from asyncrl.algo.ranges import (
    MOST_KEPT,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveShare,
    Samples,
    Share,
)
from asyncrl.config.addresses import one_address, one_interface
from asyncrl.config.algorithm import ANY_SETTINGS, OptimizerConfig
from asyncrl.config.base import OTHER_RUN, Choice, Part, marked, refused
from asyncrl.config.checkpoint_section import StopConfig
from asyncrl.config.data_section import PROMPT
from asyncrl.errors import DataError

_TOKENS = (
    OTHER_RUN,
    "it decides the tokens of every prompt and the reference; a moved model can be linked to its old path",
)


_ADAPTER = refused("the adapter and its optimizer state are in the checkpoint")


class LoraConfig(Part):
    """The low-rank adapter that is trained in place of the model's own weights (arXiv:2106.09685)."""

    rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], _ADAPTER] = 16
    """Rank r of the two matrices of each weight."""
    alpha: Annotated[Positive, _ADAPTER] = 32.0
    """Their product is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], _ADAPTER] = ()
    """Last names of adapted layers, such as `q_proj`; by default all of the blocks."""
    start: Annotated[Path | None, _ADAPTER] = None
    """Directory of a PEFT adapter to begin with."""
    load_in_4bit: Annotated[bool, refused("the adapter was trained on a base of these bits")] = False
    """True keeps the base in 4 bits (bitsandbytes; QLoRA, arXiv:2305.14314), in learner and generators."""
    sync: Literal["adapter", "merged"] = "adapter"
    """Update of generators: the adapter, or whole weights, which sample faster."""


def _template(value: Any) -> Any:
    """Return the text of a chat template in place of its path."""
    if not isinstance(value, str) or "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        text = f"found {value:.80}; as a file it cannot be read ({reason})"
        allowed = "allowed are true, false, a Jinja file such as `chat.jinja`, and the text of a template"
        raise ValueError(f"{text}; {allowed}") from error


class ModelConfig(Part):
    """The policy."""

    # A hub name, so no file is looked for.
    path: Annotated[str, marked(stand_in="no/model", resume=_TOKENS)]
    """A Hugging Face directory or hub name."""
    revision: Annotated[str | None, marked(resume=_TOKENS)] = None
    """Hub revision; pin it for repeatable runs."""
    dtype: Annotated[
        Literal["float32", "bfloat16"], refused("parameters and optimizer state are stored in it")
    ] = "bfloat16"
    """Data type of generators and learner."""
    chat_template: Annotated[bool | str, BeforeValidator(_template), PROMPT] = False
    """Chat template of prompts: the tokenizer's (true), or the path or text of a Jinja file, which exports
    then have."""
    tool_parser: str | None = None
    """vLLM's parser of tool calls, such as `hermes`; tokenizers with a `response_template` need none."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning, such as `qwen3`: thoughts are not in the answer."""
    trust_remote_code: bool = False
    """True runs the model's own Python code; read it first."""
    lora: LoraConfig | None = None
    """An adapter that is trained in place of all weights; `{}` takes the defaults."""
    router_replay: Annotated[bool, refused("stored groups have, or lack, the experts of their tokens")] = (
        False
    )
    """True trains a mixture of experts with the experts that the engine chose for each token; needs
    `generator.engine: transformers`."""

    def templated(self, tokenizer: Any) -> Any:
        """Return a tokenizer or processor of the model, with the chat template of the config."""
        if isinstance(self.chat_template, str):
            tokenizer.chat_template = self.chat_template
        return tokenizer

    @property
    def hub_options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that say which files are read, and whether its code runs."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def architecture(self) -> Any:
        """Return Hugging Face's config of the model. Raises DataError."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path, **self.hub_options)
        except Exception as error:  # its strict classes raise neither ValueError nor OSError
            found = f"model.path {self.path}: its config.json cannot be read ({error})"
            raise DataError(f"{found}; give a Hugging Face directory or name") from error

    @property
    def served_adapter(self) -> LoraConfig | None:
        """The adapter that engines apply; None if they get whole weights."""
        return self.lora if self.lora is not None and self.lora.sync == "adapter" else None

    @property
    def has_4bit_base(self) -> bool:
        """Whether learner and generators keep all but the adapter in 4 bits."""
        return self.lora is not None and self.lora.load_in_4bit

    @property
    def update_target(self) -> Literal["weights", "adapter"]:
        """What an update of the generators replaces."""
        return "weights" if self.served_adapter is None else "adapter"


class BatchConfig(Part):
    """Batch of one step."""

    groups: PositiveInt = 32
    """Groups per batch (B)."""
    group_size: Samples = 8
    """Rollouts per group (G)."""
    minibatches: PositiveInt = 1
    """Optimizer steps per batch."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    missing_episodes: NonNegativeInt = 0
    """Most failed episodes that a group may lack."""

    @property
    def sequences(self) -> int:
        """Rollouts per batch."""
        return self.groups * self.group_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches * self.epochs


class SamplingConfig(Part):
    """Sampling of rollouts for training."""

    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Temperature of generators and learner."""
    max_prompt_tokens: PositiveInt = 512
    """Token limit of prompts."""
    max_response_tokens: PositiveInt = 512
    """Token limit of responses."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the end token."""
    top_k: Annotated[
        int,
        Field(ge=-1, le=MOST_KEPT),
        refused("stored groups have, or lack, the tokens that each of their tokens could have been"),
    ] = -1
    """Most probable tokens to sample and train among; -1 or 0 is all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples among the most probable of these tokens with this share of the probability."""
    min_p: Share = 0.0
    """Share of the largest probability below which no token is sampled. It and `top_p` need `top_k`."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        return self.max_prompt_tokens + self.max_response_tokens

    @field_validator("stop")
    @classmethod
    def _stops_at_a_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("sampling.stop holds an empty text, which would end every response; drop it")
        return stop

    @field_validator("top_k")
    @classmethod
    def _zero_is_off(cls, top_k: int) -> int:
        return top_k or -1


class StalenessConfig(Part):
    """Limit of the age of trained tokens."""

    max_lag: NonNegativeInt = 4
    """L: steps by which sampling may run ahead; 0 is on-policy."""
    window_groups: PositiveInt | None = None
    """W: ids within which younger groups may overtake the oldest one; by default 0.3 (L + 1) B, or 1 at L =
    0."""
    policy: Literal["correct_only", "mask", "drop"] = "correct_only"
    """Tokens older than L, mostly of long answers: only corrected, masked out of the loss, or the group
    rejected."""


class LearnerConfig(Part):
    """The learner's processes."""

    steps: PositiveInt = 100
    """Batches to train on in the whole run."""
    stop_when: StopConfig | None = None
    """End of the training before `learner.steps`, by a metric."""
    ranks: Annotated[PositiveInt, refused("the optimizer state is stored in one part for each rank")] = 1
    """Processes of the learner, one GPU each."""
    backend: Annotated[Literal["deepspeed"], refused("it decides how the whole checkpoint is stored")] = (
        "deepspeed"
    )
    """Library that shards the model and steps the optimizer."""
    sequence_parallel: PositiveInt = 1
    """P: ranks that divide each sequence (Ulysses); divides `ranks` and the attention heads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda if there is a GPU. `cpu` holds for generators too, unless vLLM is built for GPUs."""
    zero_stage: Annotated[
        Literal[0, 1, 2, 3], refused("it decides how parameters and optimizer state are stored")
    ] = 0
    """ZeRO stage: ranks divide the optimizer state (1), also gradients (2), also parameters (3)."""
    offload_optimizer: Annotated[bool, refused("it decides how the optimizer state is stored")] = False
    """True keeps the optimizer state in host memory and steps there, slower; needs `zero_stage` 3."""
    tokens_per_microbatch: PositiveInt = 16384
    """Token budget of a packed pass; `sequence_parallel` ranks divide it."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens with logits at the same time."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Activations computed again in the backward pass: of whole layers (`true`), or of MLPs (`selective`),
    which saves more than half as much memory."""
    threads: PositiveInt | None = None
    """CPU threads per rank; by default the supervisor divides the cores."""
    optimizer: OptimizerConfig = OptimizerConfig()
    hooks: tuple[Choice, ...] = ()
    """Classes called before and after each step: `path.py:Class`, with keyword arguments."""

    @property
    def shares(self) -> int:
        """Parts of a batch that are trained on at the same time, each by `sequence_parallel` ranks."""
        return self.ranks // self.sequence_parallel


class GeneratorConfig(Part):
    """The generators."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` needs no vLLM and is many times slower."""
    count: PositiveInt | None = None
    """Generators that `asyncrl up` starts; by default as many as fit the GPUs (gpu.md), on a CPU 2."""
    tensor_parallel: PositiveInt = 1
    """GPUs per generator; must divide the attention heads."""
    max_running: PositiveInt = 256
    """Sequences in flight per generator; episodes may be more (`environment.episodes_per_slot`)."""
    gpu_memory_utilization: PositiveShare | None = None
    """Share of a GPU per generator; by default a GPU's generators divide 0.85, next to the learner 0.4."""
    kv_cache_gib: Positive | None = None
    """KV cache; by default 1 on a CPU, on a GPU what the weights leave."""
    enforce_eager: bool = False
    """True disables CUDA graphs: faster start, slower sampling."""
    threads: PositiveInt | None = None
    """CPU threads per generator; by default the supervisor divides the cores."""
    recompute_kv: bool = False
    """True prefills running requests again after each update."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """Time after which an unrenewed lease expires."""
    vllm: Annotated[dict[str, JsonValue], WithJsonSchema(ANY_SETTINGS)] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, such as `quantization: fp8`."""


class WeightsConfig(Part):
    """Transfer of weights from the learner to the generators."""

    transport: Literal["auto", "slot", "tcp", "nccl", "disk"] = "auto"
    """`slot` reads the learner's memory on one host, `tcp` fetches it, `nccl` brings it from GPU to GPU.
    `auto` is slot on one host, else tcp."""
    slots: Literal["auto", "gpu", "host"] = "auto"
    """Place of a GPU learner's published weights: rank 0's GPU, or host memory, which delays training more.
    `auto` is gpu where generators can read it."""
    deadline_s: Positive = 60.0
    """Time limit of a transfer."""
    bucket_mib: PositiveInt = 64
    """Largest piece that `nccl` sends, rounded down to a multiple of 16."""
    probe_tokens: Annotated[int, Field(ge=2, le=8192)] = 32
    """Longest of three sequences that learner and generator score after every update."""
    probe_limit: Positive = 0.05
    """Difference of log-probabilities on them that is always allowed, in nats; in bfloat16 or quantised the
    limit follows the first difference."""


class ControlConfig(Part):
    """The ZMQ control plane."""

    bind: (
        Annotated[
            str,
            Field(pattern=r"^(auto|tcp://.*:[0-9]+)$", examples=["tcp://10.0.0.1:5555"]),
            AfterValidator(one_address),
        ]
        | None
    ) = None
    """Address for other hosts, as `store.bind`; `auto` alone has port 16380. Weights come from any free port
    of it."""
    heartbeat_s: Positive = 1.0
    """Interval of a generator's heartbeats."""
    timeout_s: Positive = 15.0
    """Silence after which a generator counts as dead."""
    stall_s: Positive = 1800.0
    """Time without a new group until the learner stops."""
    hang_s: Annotated[float, Field(ge=60)] = 300.0
    """Time without progress after which a process restarts."""
    slow_s: Annotated[float, Field(ge=60)] = 1800.0
    """The same at a start, a load, a save, or in your hooks."""
    max_restarts: NonNegativeInt = 5
    """Most restarts of a process within ten minutes; then the run stops."""


class ClusterConfig(Part):
    """The hosts of a run."""

    kind: Literal["local", "ray", "slurm", "kubernetes"] | None = None
    """Place of the hosts: `local`, this machine; `ray`, the cluster at RAY_ADDRESS; `slurm`, a job; for
    `kubernetes`, `asyncrl up` prints manifests. By default there is one host."""
    learner_hosts: PositiveInt = 1
    """Hosts that divide `learner.ranks` and share the run directory."""
    generator_hosts: PositiveInt = 1
    """Hosts with `generator.count` generators each."""
    pending_s: Positive = 300.0
    """Time to wait for a host before the run stops."""
    image: Annotated[str, Field(min_length=1, examples=["ghcr.io/you/asyncrl:0.1.0"])] | None = None
    """Image of every pod; Kubernetes needs one."""
    claim: Annotated[str, Field(min_length=1)] | None = None
    """Persistent volume claim for the run directory; by default one is made."""
    claim_gib: PositiveInt = 100
    """Size of the claim that is made."""
    sbatch: tuple[Annotated[str, Field(pattern=r"^--[a-z-]+(=.+)?$")], ...] = ()
    """Options of sbatch for each job, such as `--partition=gpu`."""


class EvalConfig(Part):
    """Held-out evaluation during training."""

    every: PositiveInt = 10
    """Steps between evaluations; needs `data.eval`."""
    prompts: PositiveInt = 128
    """Number of prompts, from the start of `data.eval`."""
    samples: Samples = 1
    """Samples per prompt, for pass@k, best@k and maj@k."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Temperature; 0 is greedy and allows one sample."""


class TelemetryConfig(Part):
    """Destinations of metrics; JSONL files are always written."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline writes files for `wandb sync`."""
    wandb_project: str = "asyncrl"
    """Project in Weights & Biases."""
    tensorboard: bool = False
    """Event files in RUN/tensorboard; needs asyncrl[tensorboard]."""
    trace: bool = True
    """Timeline in RUN/trace_events.json."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the learner's /metrics; that of generator i is 1 + i higher. 0: any free, null: off."""
    prometheus_host: Annotated[str, AfterValidator(one_interface)] = "127.0.0.1"
    """Interface of these ports, on other hosts the one towards it; each client in reach may read metrics."""
    samples_per_step: NonNegativeInt = 4
    """Rollouts per step in samples.jsonl."""
    pairs: bool = False
    """True appends best and worst of each trained group to RUN/pairs.jsonl; `asyncrl samples --pairs` has
    them in TRL's format."""
