"""The sections of a config, one frozen model each; `schema` puts them together. Names carry units."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, WithJsonSchema, field_validator, model_validator

from asyncrl.algo.ranges import NonNegativeInt, Positive, PositiveInt, Share
from asyncrl.config.addresses import require_one_address, require_one_interface
from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.base import Choice, Mistake, Mistakes, Part, marked
from asyncrl.config.checkpoint_section import StopConfig
from asyncrl.config.data_section import PROMPT
from asyncrl.config.resume import OTHER_RUN, refused
from asyncrl.config.wording import divisors

ANY_SETTINGS = {"type": "object", "additionalProperties": True}

_TOKENS = (
    OTHER_RUN,
    "it decides the tokens of every prompt and the reference; a moved model can be linked to its old path",
)


_ADAPTER = refused("the adapter and its optimizer state are in the checkpoint")


class LoraConfig(Part):
    """The low-rank adapter that is trained in place of the model's own weights (arXiv:2106.09685)."""

    rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], _ADAPTER] = 16
    """Rank r of the two matrices that are added to each weight; vLLM offers these."""
    alpha: Annotated[Positive, _ADAPTER] = 32.0
    """The product of the two matrices is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], _ADAPTER] = ()
    """Last names of the linear layers with an adapter, such as `q_proj`; by default all of the blocks."""
    start: Annotated[Path | None, _ADAPTER] = None
    """Directory of an adapter to begin with, as PEFT writes it; by default one that changes nothing."""
    sync: Literal["adapter", "merged"] = "adapter"
    """What generators get: the small adapter, or the whole weights with it added, which sample faster."""


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
    """Data type of the generators' weights and of the learner's forward and backward passes."""
    chat_template: Annotated[bool, PROMPT] = False
    """True renders prompts as chat messages with the tokenizer's template."""
    tool_parser: str | None = None
    """vLLM's parser of tool calls, such as `hermes`; a tokenizer with a `response_template` needs none."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning, such as `qwen3`: what the model thinks is not in its answer, and a tool
    call inside of it is not made. A tokenizer with a `response_template` needs none."""
    trust_remote_code: bool = False
    """True runs Python code that comes with the model; read it first."""
    lora: LoraConfig | None = None
    """An adapter that is trained in place of the model's own weights; `{}` takes the defaults, and null, the
    default, trains the weights."""
    router_replay: Annotated[bool, refused("stored groups have, or lack, the experts of their tokens")] = (
        False
    )
    """True trains each token of a mixture of experts with the experts that the engine chose for it. How much
    each counts is computed by the learner. Needs `generator.engine: transformers`."""

    @property
    def served_adapter(self) -> LoraConfig | None:
        """The adapter that engines apply; None if they get whole weights."""
        return self.lora if self.lora is not None and self.lora.sync == "adapter" else None

    @property
    def update_target(self) -> Literal["weights", "adapter"]:
        """What an update of the generators replaces."""
        return "weights" if self.served_adapter is None else "adapter"


class BatchConfig(Part):
    """Size of the batch that one step trains on."""

    groups: PositiveInt = 32
    """Groups per batch (B)."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts per group (G)."""
    minibatches: PositiveInt = 1
    """Optimizer steps per batch; the policy version counts batches."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    missing_episodes: NonNegativeInt = 0
    """Most episodes that a group may go without, after `environment.replays` of each have failed. With 0 the
    ticket fails and is sampled again: failures may depend on what the policy did, so leaving them out
    selects."""

    @property
    def sequences(self) -> int:
        """Rollouts per batch."""
        return self.groups * self.group_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches * self.epochs

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.groups % self.minibatches:
            found = f"groups ({self.groups}) must divide into minibatches ({self.minibatches})"
            text = f"{found}; use one of {divisors(self.groups)}"
            raise Mistakes(Mistake(("batch.minibatches", "batch.groups"), text))
        return self


class SamplingConfig(Part):
    """Sampling of rollouts for training."""

    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Temperature of the trained policy, in generators and learner. vLLM supports none between 0 and 0.01."""
    max_prompt_tokens: PositiveInt = 512
    """Token limit of prompts; longer ones are refused at start, with their row."""
    max_response_tokens: PositiveInt = 512
    """Token limit of responses; a longer one is cut off, with `finish_reason` "length"."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, in addition to the model's end token."""
    top_p: float = 1.0
    """Must be 1: the learner cannot correct for a truncated distribution."""
    top_k: int = -1
    """Must be -1 or 0 (off), for the same reason."""
    min_p: float = 0.0
    """Must be 0, for the same reason."""

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

    @model_validator(mode="after")
    def _not_truncated(self) -> Self:
        if self.top_p != 1.0 or self.top_k not in (-1, 0) or self.min_p != 0.0:
            found = f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} truncate the distribution"
            allowed = "set top_p=1.0, top_k=-1, min_p=0.0, and shape it with `temperature`"
            text = f"{found}, which the learner cannot correct for; {allowed}"
            raise Mistakes(Mistake(("sampling.top_p", "sampling.top_k", "sampling.min_p"), text))
        return self


class StalenessConfig(Part):
    """Limit of the age of tokens when they are trained."""

    max_lag: NonNegativeInt = 4
    """L: steps by which sampling may run ahead; 0 is synchronous on-policy training."""
    window_groups: PositiveInt | None = None
    """W: number of ids within which younger groups may overtake the oldest unfinished one; 0.3 (L + 1) B by
    default, none at L = 0."""
    policy: Literal["correct_only", "mask", "drop"] = "correct_only"
    """Treatment of tokens older than L: only corrected by importance weights, masked out of the loss, or the
    whole group rejected. The last two affect mostly long answers."""


class LearnerConfig(Part):
    """The learner's processes."""

    steps: PositiveInt = 100
    """Batches to train on in the whole run."""
    stop_when: StopConfig | None = None
    """An earlier end, as at the last step; by default there is none."""
    ranks: Annotated[PositiveInt, refused("the optimizer state is stored in one part for each rank")] = 1
    """Processes of the learner, one GPU each, on `cluster.learner_hosts` hosts."""
    backend: Annotated[Literal["deepspeed"], refused("it decides how the whole checkpoint is stored")] = (
        "deepspeed"
    )
    """Library that shards the model and steps the optimizer."""
    sequence_parallel: PositiveInt = 1
    """P: ranks that divide each long sequence (Ulysses); it must divide `ranks` and the attention heads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda if there is a GPU. `cpu` is for generators too, unless vLLM is built for GPUs."""
    zero_stage: Annotated[
        Literal[0, 1, 2, 3], refused("it decides how parameters and optimizer state are stored")
    ] = 0
    """DeepSpeed ZeRO stage: ranks divide the optimizer state (1), also gradients (2), also parameters (3)."""
    offload_optimizer: Annotated[bool, refused("it decides how the optimizer state is stored")] = False
    """True keeps the optimizer state of a learner on GPUs in host memory and steps there, which is slower;
    needs `zero_stage` 3, and no compiler."""
    tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one packed forward and backward pass; `sequence_parallel` ranks divide it."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at the same time."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Saves memory: the backward pass computes activations again, those of whole layers (`true`) or only of
    their MLPs (`selective`), which saves more than half as much in less time."""
    threads: PositiveInt | None = None
    """CPU threads per rank; by default the supervisor divides the cores."""
    optimizer: OptimizerConfig = OptimizerConfig()
    hooks: tuple[Choice, ...] = ()
    """Your own classes, called before and after each step: `path.py:Class`, with keyword arguments."""

    @property
    def shares(self) -> int:
        """Parts of a batch that are trained on at the same time, each by `sequence_parallel` ranks."""
        return self.ranks // self.sequence_parallel

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.ranks % self.sequence_parallel:
            found = f"found {self.sequence_parallel}, which does not divide learner.ranks ({self.ranks})"
            text = f"{found}; set one of {divisors(self.ranks)}, or other ranks"
            raise Mistakes(Mistake(("learner.sequence_parallel", "learner.ranks"), text))
        return self


class GeneratorConfig(Part):
    """The generators."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` samples with `transformers.generate`, many times slower; it needs no vLLM."""
    count: PositiveInt | None = None
    """Generators that `asyncrl up` starts; more may join at any time. By default one for each
    `tensor_parallel` GPUs without a learner rank, else one for each `tensor_parallel` GPUs; on a CPU 2."""
    tensor_parallel: PositiveInt = 1
    """GPUs per generator; must divide the number of attention heads."""
    max_running: PositiveInt = 256
    """Sequences in flight per generator; tickets are leased to fill it. Of episodes, more are in flight while
    others wait for their environment (`environment.episodes_per_slot`)."""
    gpu_memory_utilization: Share | None = None
    """Share of a GPU's memory that each generator may use. By default the generators of a GPU divide 0.85,
    or 0.4 if the learner is on it too."""
    kv_cache_gib: Positive | None = None
    """KV cache per generator. By default 1 on a CPU; on a GPU what the weights leave of its share."""
    enforce_eager: bool = False
    """True disables CUDA graphs: the engine starts faster and samples slower."""
    threads: PositiveInt | None = None
    """CPU threads per generator; by default the supervisor divides the cores."""
    recompute_kv: bool = False
    """True prefills running requests again after every weight update."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """Time after which a lease that was not renewed expires; its ticket is issued again."""
    vllm: Annotated[dict[str, JsonValue], WithJsonSchema(ANY_SETTINGS)] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, such as `quantization: fp8`; config.md lists the refused ones."""


class WeightsConfig(Part):
    """Transfer of weights from the learner to the generators."""

    transport: Literal["auto", "slot", "tcp", "nccl", "disk"] = "auto"
    """`slot`: generators of one host read the learner's memory. `tcp`: generators of other hosts fetch it.
    `nccl`: two processes bring it to each host, from GPU to GPU. `auto` is slot on one host, else tcp."""
    slots: Literal["auto", "gpu", "host"] = "auto"
    """Where a learner on GPUs publishes: on rank 0's GPU, or in memory of the host, for which training waits
    longer. `auto` is gpu, unless a generator of this host has a GPU that cannot read rank 0's."""
    deadline_s: Positive = 60.0
    """Time limit of a transfer; after it the transfer is given up and tried again."""
    bucket_mib: PositiveInt = 64
    """Largest piece that `nccl` sends, rounded down to a multiple of 16, at least 16."""
    probe_tokens: Annotated[int, Field(ge=2)] = 32
    """Length of the fixed sequence that learner and generator score after every update."""
    probe_limit: Positive = 0.05
    """Difference of log-probabilities between generator and learner on that sequence that is always allowed.
    bfloat16 or quantised, it may be twice the first difference on average, and four times at most."""


class ControlConfig(Part):
    """The ZMQ control plane."""

    bind: (
        Annotated[str, Field(pattern=r"^(auto|tcp://.*:[0-9]+)$", examples=["tcp://10.0.0.1:5555"])] | None
    ) = None
    """tcp://HOST:PORT for generators on other hosts; a socket file in the run directory by default. HOST may
    be `auto`, the address that reaches the other hosts. `auto` alone has port 16380."""
    heartbeat_s: Positive = 1.0
    """Interval between two heartbeats of a generator."""
    timeout_s: Positive = 15.0
    """Silence after which a generator is counted as dead; its tickets are issued again."""
    stall_s: Positive = 1800.0
    """Time without a new group after which the learner stops with an explanation."""
    hang_s: Annotated[float, Field(ge=60)] = 300.0
    """Time without progress after which a process is killed and restarted."""
    slow_s: Annotated[float, Field(ge=60)] = 1800.0
    """The same limit while a process starts, loads a model, writes a checkpoint or runs your hooks."""
    max_restarts: NonNegativeInt = 5
    """Restarts of one process within ten minutes; after more, the run stops."""

    @field_validator("bind")
    @classmethod
    def _binds_one_interface(cls, bind: str | None) -> str | None:
        if bind is not None:
            require_one_address("control.bind", bind)
        return bind


class ClusterConfig(Part):
    """The hosts of a run."""

    kind: Literal["local", "ray", "slurm", "kubernetes"] | None = None
    """Engine that places hosts. `local` makes them on this machine, each with a network of its own, as a
    rehearsal. `ray` is the cluster at RAY_ADDRESS. `slurm` submits a job, whose nodes are the hosts. For
    `kubernetes`, `asyncrl up` prints manifests. By default it uses this machine only."""
    learner_hosts: PositiveInt = 1
    """Hosts of the learner, which divide `learner.ranks` and share the run directory."""
    generator_hosts: PositiveInt = 1
    """Hosts with `generator.count` generators each."""
    pending_s: Positive = 300.0
    """Seconds to wait for a host, and generators for the learner, before the run stops with the reason."""
    image: Annotated[str, Field(min_length=1, examples=["ghcr.io/you/asyncrl:0.1.0"])] | None = None
    """Image of every pod; Kubernetes needs one."""
    claim: Annotated[str, Field(min_length=1)] | None = None
    """Name of the persistent volume claim for the learner's run directory; by default one is made."""
    claim_gib: PositiveInt = 100
    """Size in GiB of the claim that is made; `asyncrl plan` says what checkpoints take."""
    sbatch: tuple[Annotated[str, Field(pattern=r"^--[a-z-]+(=.+)?$")], ...] = ()
    """Options of sbatch for each job of the run, such as `--partition=gpu`: one a word. They come after ours,
    and the last of an option counts."""


class EvalConfig(Part):
    """Held-out evaluation by the generators during training."""

    every: PositiveInt = 10
    """Steps between evaluations; needs `data.eval`."""
    prompts: PositiveInt = 128
    """Number of prompts, taken from the start of `data.eval`; every round uses the same ones."""
    samples: PositiveInt = 1
    """Samples per prompt; several give pass@k, best@k, mean@k, and maj@k if a reward returns the answer."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of evaluation; 0 is greedy and allows only one sample."""


class TelemetryConfig(Part):
    """Destinations of metrics; JSONL files are always written."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline writes files for `wandb sync`."""
    wandb_project: str = "asyncrl"
    """Project in Weights & Biases; the run has the name `run.name`."""
    tensorboard: bool = False
    """Event files in RUN/tensorboard; needs asyncrl[tensorboard]."""
    trackio: bool = False
    """Trackio's local database; needs asyncrl[trackio]."""
    trackio_project: str = "asyncrl"
    """Project in Trackio; the run has the name `run.name`."""
    trace: bool = True
    """Timeline in RUN/trace_events.json; with the previous file at most 64 MiB."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the learner's /metrics and /health, plus 1 + i for generator i; 0: any free, null: off."""
    prometheus_host: str = "127.0.0.1"
    """Interface on which these ports listen. Every client that reaches it may read the metrics."""
    samples_per_step: NonNegativeInt = 4
    """Rollouts that each step writes to samples.jsonl."""
    pairs: bool = False
    """True appends best and worst of each trained group to RUN/pairs.jsonl, in TRL's columns `prompt`,
    `chosen` and `rejected`; `asyncrl samples --pairs` prints them."""

    @field_validator("prometheus_host")
    @classmethod
    def _listens_on_one_interface(cls, host: str) -> str:
        require_one_interface("telemetry.prometheus_host", host)
        return host
