"""The memory that a rank of the learner and a generator need, computed before anything is loaded.

N parameters, b bytes of the model's dtype, R ranks. AdamW keeps two float32 moments, other optimizers less.
In bfloat16, and with any ZeRO stage above 0, there is a float32 master copy, too. ZeRO 1 shards master copy
and moments, 2 also the accumulated gradients, 3 also the weights. With `model.lora`, all but the weights are
of the adapter only. A vision part is frozen, and has weights only.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.schema import Config
from asyncrl.config.sections import GeneratorConfig, LearnerConfig, ModelConfig, WeightsConfig

FP32 = 4  # bytes
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS_BYTES = 2 * FP32
# bitsandbytes keeps two moments of a byte each, and of each 256 in a row their float32 maxima.
MOMENTS_8BIT_BYTES = 2 * (1 + FP32 / 256)
# In 4 bits it keeps a scale of a byte for each 64 weights in a row, and a float32 for each 256 scales.
BYTES_IN_4BIT = 0.5 + (1 + FP32 / 256) / 64
# DeepSpeed reduces gradients in buckets of this many numbers, and in ZeRO 3 has this many gathered weights.
BUCKET_NUMBERS, GATHERED_WEIGHTS = 500_000_000, 1_000_000_000
# In ZeRO 3 the optimizer takes this many of a rank's numbers at a time: DeepSpeed's `sub_group_size`.
STEPPED_NUMBERS = 1_000_000_000
# Logits of a chunk, their exponentials and gradients, in float32.
LOGIT_COPIES = 3
# Names of parts. The two processes are those of `weights.transport: nccl`.
SLOTS, CUDA = "published versions", "CUDA"
SENDER, RECEIVER = "process that sends", "process that receives"
# KV cache of a generator on a CPU whose config names no size.
CPU_KV_CACHE_GIB = 1.0
# Of a process on a GPU: CUDA's context, the libraries' workspaces, NCCL's buffers.
CONTEXT_BYTES = 1 << 30
# Buffers of one communicator of NCCL: an estimate, no GPU has measured it.
COMMUNICATOR_BYTES = 410 << 20
# Buckets of received weights are multiples of this, and at least one: `weights.layout.Layout.pieces`.
BUCKET_STEP_BYTES = 16 << 20
# A generator's engine besides weights and KV cache; its sampler per running sequence, in copies of logits.
ENGINE_BYTES, SAMPLER_COPIES = 2 << 30, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of an architecture."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    query: int  # attention heads times their size
    kv: int  # key-value heads times their size
    vocabulary: int
    # Bytes that all layers keep of a token for the backward pass, with the dtype and the
    # `learner.gradient_checkpointing` of the run; None if that was not counted, and why it could not be.
    kept_per_token: int | None = None
    uncounted: str = ""
    # Numbers of the adapter of `model.lora`, which `parameters` does not count; 0 without.
    adapter: int = 0
    # Of `parameters`, those of a vision part: neither trained nor published.
    frozen: int = 0
    in_4bit: int = 0  # of `parameters`, those that `model.lora.load_in_4bit` keeps in 4 bits
    # Of `parameters`, those of embeddings and output layer, which are one table where they are tied.
    tables: int = 0
    stacked: int = 0  # of those with a gradient, experts in one tensor, of which Muon steps none

    @classmethod
    def of(cls, config: Any, parameters: int) -> Self:
        """The sizes in a model's Hugging Face `config`, with its number of `parameters`."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            parameters=parameters,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            query=heads * head_size,
            kv=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
            vocabulary=text.vocab_size,
            tables=text.vocab_size * text.hidden_size * (1 if config.tie_word_embeddings else 2),
        )

    @property
    def is_tied(self) -> bool:
        """Whether embeddings and output layer are one table."""
        return self.tables <= self.vocabulary * self.hidden

    def without_output_layer(self) -> Self:
        """The sizes of a critic, whose value head takes the place of an output layer."""
        table = 0 if self.is_tied else self.vocabulary * self.hidden
        return replace(self, parameters=self.parameters - table, tables=self.tables - table)

    @property
    def trained(self) -> int:
        """How many numbers have a gradient."""
        return self.adapter or self.parameters - self.frozen


def zero_stage(wanted: int, dtype: str) -> int:
    """The ZeRO stage, but 1 instead of 0 in bfloat16: only ZeRO keeps AdamW's float32 master weights."""
    return 1 if wanted == 0 and dtype == "bfloat16" else wanted


def weights_bytes(shape: ModelShape, model: ModelConfig) -> int:
    """One copy of the weights: N b, less of those in 4 bits."""
    whole = shape.parameters - shape.in_4bit
    return whole * DTYPE_BYTES[model.dtype] + round(shape.in_4bit * BYTES_IN_4BIT)


def published_bytes(shape: ModelShape, model: ModelConfig) -> int:
    """One published version: the weights without those of a vision part, or the adapter."""
    numbers = shape.adapter if model.update_target == "adapter" else shape.parameters - shape.frozen
    return numbers * DTYPE_BYTES[model.dtype]


# What each optimizer keeps of all gradients, besides a master copy: how it is counted, and its bytes.
# Adafactor keeps a number for each row and each column of a matrix.
MOMENTS: dict[str, tuple[str, Callable[[ModelShape], float]]] = {
    "adamw": ("AdamW: parameters x 8", lambda one: one.trained * MOMENTS_BYTES),
    "adamw_8bit": ("AdamW in 8 bits: parameters x 2.03", lambda one: one.trained * MOMENTS_8BIT_BYTES),
    "muon": (
        "Muon: parameters x 4, x 8 of embeddings, output layer and experts",
        lambda one: (one.trained + (0 if one.adapter else one.tables) + one.stacked) * FP32,
    ),
    "adafactor": ("Adafactor: rows and columns x 4", lambda one: one.trained * 2 * FP32 // one.hidden),
}


def moments_bytes(shape: ModelShape, optimizer: OptimizerConfig) -> int:
    """Bytes of the moments of an optimizer."""
    return round(MOMENTS[optimizer.kind][1](shape))


@dataclass(frozen=True, slots=True)
class Part:
    """A row of the table of what fills a GPU: its formula, and the settings that make it smaller."""

    name: str
    size_bytes: int
    formed: str = ""
    cures: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One trained model on one rank of the learner, at the peak of its step."""

    shape: ModelShape
    model: ModelConfig
    learner: LearnerConfig

    @property
    def stage(self) -> int:
        """The ZeRO stage that it has."""
        return zero_stage(self.learner.zero_stage, self.model.dtype)

    def _share(self, numbers: int, size: float, *, from_stage: int) -> int:
        """Return one rank's bytes of `numbers`, which ZeRO shards from a stage on."""
        ranks = self.learner.ranks if self.stage >= from_stage else 1
        return -(-int(numbers * size) // ranks)

    @property
    def weights(self) -> int:
        """Bytes of the weights, and of an adapter."""
        whole = replace(self.shape, parameters=self.shape.parameters + self.shape.adapter)
        return self._share(weights_bytes(whole, self.model), 1, from_stage=3)

    @property
    def of_one_pass(self) -> int:
        """Bytes of one pass's gradients, which float32 below ZeRO 2 adds in place to the accumulated ones."""
        apart = self.stage >= 2 or self.model.dtype == "bfloat16"
        return self._share(self.shape.trained * apart, DTYPE_BYTES[self.model.dtype], from_stage=3)

    def accumulated(self, *, from_stage: int) -> int:
        """Bytes of the accumulated gradients, if they are on the GPU."""
        numbers = 0 if self.learner.offload_optimizer else self.shape.trained
        return self._share(numbers, FP32, from_stage=from_stage)

    def optimizer(self, optimizer: OptimizerConfig) -> int:
        """Bytes of moments and master copy."""
        if self.learner.offload_optimizer:
            return 0
        master = self.shape.trained * FP32 if self.stage > 0 else 0
        return self._share(moments_bytes(self.shape, optimizer) + master, 1, from_stage=1)

    @property
    def head(self) -> int:
        """What the gradient of the output layer's weight adds; an adapter leaves that layer as it is.

        Backward begins with it, when all activations exist: in float32, then rounded to the model's dtype. If
        the layer is the embedding, too, backward ends with the gradients of both and their sum, without
        activations. From ZeRO 2 on, they take the place of others: those of the last pass are gone by then.
        """
        numbers = 0 if self.shape.adapter else self.shape.vocabulary * self.shape.hidden
        size = DTYPE_BYTES[self.model.dtype]
        first = numbers * (FP32 + size * (size < FP32))
        last = numbers * 3 * size - self.activations if self.shape.is_tied else 0
        replaced = self.of_one_pass if self.stage >= 2 else 0
        return max(0, max(first, last) - replaced)

    def resting(self, optimizer: OptimizerConfig) -> int:
        """Bytes that the model keeps while another takes its step.

        DeepSpeed keeps the accumulated gradients in bfloat16, except in ZeRO 2. In ZeRO 3 it always does, and
        keeps the bucket of each engine, too.
        """
        resting, stage = self.weights + self.optimizer(optimizer), self.stage
        if stage == 3 or (stage < 2 and self.model.dtype == "bfloat16"):
            resting += self.accumulated(from_stage=3)
        return resting + (self._bucket if stage == 3 else 0)

    @property
    def _bucket(self) -> int:
        return min(self.shape.trained, BUCKET_NUMBERS) * DTYPE_BYTES[self.model.dtype]

    @property
    def buffers(self) -> int:
        """What DeepSpeed adds: a bucket of gradients, and in ZeRO 3 the weights that are gathered at a time.

        Without ZeRO, and in ZeRO 1 with bfloat16, a bucket is made after the last backward pass, when the
        activations are gone. So is the copy of gradients that ZeRO 3 makes for the optimizer in bfloat16.
        """
        learner, is_half = self.learner, self.model.dtype == "bfloat16"
        if self.stage == 0 or (self.stage == 1 and is_half):
            return max(0, self._bucket - self.activations)
        gathered = 0
        if self.stage == 3 and learner.ranks > 1:
            gathered = min(self.shape.parameters, GATHERED_WEIGHTS) * DTYPE_BYTES[self.model.dtype]
        if self.stage == 3 and is_half and not learner.offload_optimizer:
            copied = min(-(-self.shape.trained // learner.ranks), STEPPED_NUMBERS) * FP32
            gathered = max(gathered, copied - self.activations)
        return self._bucket + gathered

    @property
    def activations(self) -> int:
        """Bytes that are kept of a full packed micro-batch for the backward pass, and a chunk of logits.

        Layers that were not counted are taken for Llama's; the last norm keeps as much as theirs.
        """
        shape, learner = self.shape, self.learner
        tokens = -(-learner.tokens_per_microbatch // learner.sequence_parallel)
        if (kept := shape.kept_per_token) is None:
            layer = kept_bytes_per_token(shape, self.model)
            kept = kept_at_peak(shape, self.model, learner.gradient_checkpointing, layer_bytes=layer)
            kept += _norm_bytes(shape, self.model)
        logits = min(learner.logprob_chunk_tokens, tokens) * shape.vocabulary * LOGIT_COPIES * FP32
        return tokens * kept + logits

    def parts(self, *, reference: ModelShape | None, critic: OptimizerConfig | None) -> Iterator[Part]:
        """Yield what torch allocates, row by row. `critic` is the optimizer of one."""
        learner, half, shards = self.learner, self.model.dtype == "bfloat16", self.learner.zero_stage >= 2
        each = f", what ZeRO {learner.zero_stage} shards / {learner.ranks} ranks" if learner.ranks > 1 else ""
        backward = ", x 2 of one backward pass" if half else ", as much of one backward pass" * shards
        master = ", x 4 of the float32 master copy" if half or learner.zero_stage > 0 else ""
        tokens, along = "tokens_per_microbatch", learner.sequence_parallel
        tokens += f" / {along} (sequence_parallel)" if along > 1 else ""
        less = ", less those of one pass" if shards else ""

        kinds = {learner.optimizer.kind, (critic or learner.optimizer).kind}

        def sharded(stage: int) -> list[str]:
            # Muon and Adafactor need whole matrices.
            is_possible = learner.ranks > 1 and self.stage < stage and not kinds & {"muon", "adafactor"}
            return ["raise learner.zero_stage"] if is_possible else []

        offloaded = offload_cures(learner, self.stage, kinds)
        yield Part("learner weights", self.weights, f"as above{each}", sharded(3))
        formed = f"parameters x 4, accumulated in float32{backward}{each}"
        size_bytes = self.of_one_pass + self.accumulated(from_stage=2)
        yield Part("gradients", size_bytes, formed, [*sharded(2), *offloaded])
        formed = f"{MOMENTS[learner.optimizer.kind][0]}{master}{each}"
        yield Part("optimizer", self.optimizer(learner.optimizer), formed, [*sharded(1), *offloaded])
        formed = f"{tokens} x what layers keep for backward, and the logits of one chunk"
        yield Part("activations", self.activations, formed, activation_cures(learner))
        formed = f"its parameters x {6 if half else 4} of gradient"
        if self.shape.is_tied and not half:
            formed += ", or x 12 less activations, as it is the embedding, too"
        yield Part("output layer", self.head, f"{formed}{less}")
        formed = "buckets and copies of gradients, gathered weights of ZeRO 3, less activations"
        yield Part("buffers", self.buffers, formed)
        if reference:
            formed, frozen = "weights, for algorithm.kl or the advantage", replace(self, shape=reference)
            yield Part("reference", frozen.weights, formed, sharded(3))
        if critic:
            kept = "what a model like the policy keeps between its steps"
            formed = f"{kept}, in ZeRO 3 with a bucket of its own"
            resting = replace(self, shape=self.shape.without_output_layer()).resting(critic)
            yield Part("critic", resting, formed, [*sharded(3), *offloaded])

    def torch_bytes(
        self, rank: int, *, reference: ModelShape | None, critic: OptimizerConfig | None, slots: int
    ) -> int:
        """What torch allocates in a rank, of which the first one has `slots` published versions."""
        published = 0 if rank else slots * published_bytes(self.shape, self.model)
        return published + sum(part.size_bytes for part in self.parts(reference=reference, critic=critic))

    def gpu_parts(self, weights: WeightsConfig) -> Iterator[Part]:
        """Yield what else is on the first rank's GPU; others have only CUDA."""
        slots, cures = gpu_slots(weights), ["set weights.slots: host"] if weights.transport != "nccl" else []
        formed = f"{self.model.update_target} x {slots}, which generators load; on the first rank only"
        yield Part(SLOTS, slots * published_bytes(self.shape, self.model), formed, cures)
        yield Part(CUDA, CONTEXT_BYTES, "context, workspaces, buffers of NCCL")
        if weights.transport == "nccl":
            formed = "nccl: 1 GiB for CUDA + 0.4 GiB for NCCL, for one host of generators; first rank only"
            yield Part(SENDER, CONTEXT_BYTES + COMMUNICATOR_BYTES, formed)


def activation_cures(learner: LearnerConfig) -> list[str]:
    """Return the settings with which a step keeps less, the most helpful one first."""
    recomputed = ["set learner.gradient_checkpointing: true"]
    if learner.gradient_checkpointing is True:
        recomputed = ["raise learner.sequence_parallel"] if learner.sequence_parallel < learner.ranks else []
    return [*recomputed, f"lower learner.tokens_per_microbatch ({learner.tokens_per_microbatch})"]


def offload_cures(learner: LearnerConfig, stage: int, kinds: Collection[str]) -> list[str]:
    """Return the setting that moves optimizers of these kinds to the host, if that is not set."""
    with_stage = " with learner.zero_stage: 3" if stage < 3 else ""
    is_possible = {*kinds} == {"adamw"} and not learner.offload_optimizer
    return [f"set learner.offload_optimizer: true{with_stage}"] if is_possible else []


def offloaded_bytes(shape: ModelShape, learner: LearnerConfig) -> int:
    """Bytes of host memory of all ranks for one trained model: the float32 gradients, master copy and moments
    that `learner.offload_optimizer` keeps there instead of on the GPUs. DeepSpeed has the gradients twice.
    """
    return shape.trained * (3 * FP32 + MOMENTS_BYTES) if learner.offload_optimizer else 0


def kept_bytes_per_token(shape: ModelShape, model: ModelConfig) -> int:
    """Bytes per token that one layer of Llama's kind keeps for the backward pass, in torch without fusion.

    Two norms. Queries, keys, values and the attention's output, which is stored once more when heads are
    joined. Of the MLP: gate, its activation, up, and their product. Attention keeps a float32 for each head;
    16 bytes stand for these and for the norms' scales.
    """
    size = DTYPE_BYTES[model.dtype]
    attention, mlp = 3 * shape.query + 2 * shape.kv, 4 * shape.intermediate
    return 2 * _norm_bytes(shape, model) + size * (attention + mlp) + 16 * FP32


def _norm_bytes(shape: ModelShape, model: ModelConfig) -> int:
    """An RMSNorm keeps its input in float32, and in the model's dtype the normalised input and the output."""
    return shape.hidden * (FP32 + 2 * DTYPE_BYTES[model.dtype])


def gpu_slots(weights: WeightsConfig) -> int:
    """How many published versions are on rank 0's GPU: one that generators load, and one being written."""
    return 0 if weights.slots == "host" else 2


def generator_kv_bytes(
    shape: ModelShape, model: ModelConfig, generator: GeneratorConfig, *, allowed_bytes: int
) -> int:
    """What is left of a GPU's `allowed_bytes` for a generator's KV cache; negative if too little."""
    weights = -(-weights_bytes(shape, model) // generator.tensor_parallel)
    sampler = generator.max_running * shape.vocabulary * SAMPLER_COPIES * FP32
    return allowed_bytes - weights - ENGINE_BYTES - sampler


def receiver_bytes(weights: WeightsConfig) -> int:
    """Bytes of the process that receives over NCCL: context, communicator, two buckets. 0 without NCCL."""
    steps = max((weights.bucket_mib << 20) // BUCKET_STEP_BYTES, 1)
    needed = CONTEXT_BYTES + COMMUNICATOR_BYTES + 2 * steps * BUCKET_STEP_BYTES
    return needed if weights.transport == "nccl" else 0


def kept_at_peak(
    shape: ModelShape, model: ModelConfig, setting: bool | Literal["selective"], *, layer_bytes: int
) -> int:
    """Bytes per token of the activations of all layers, when most of them exist.

    `setting` is `learner.gradient_checkpointing`, and `layer_bytes` is what one layer keeps for a token
    without it. Four states of it are the MLP's: gate, its activation, up, and their product. With `selective`
    a layer keeps the others, with `true` only its input; what is missing is computed again for one layer.
    """
    size = DTYPE_BYTES[model.dtype]
    if setting == "selective":
        mlp_bytes = size * 4 * shape.intermediate
        return shape.layers * (layer_bytes - mlp_bytes) + mlp_bytes
    return shape.layers * size * shape.hidden + layer_bytes if setting else shape.layers * layer_bytes


def kv_bytes_per_token(shape: ModelShape, model: ModelConfig) -> int:
    """Bytes of the keys and values of all layers: 2 layers kv b."""
    return 2 * shape.layers * shape.kv * DTYPE_BYTES[model.dtype]


def sequence_kv_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes of the KV cache that the longest sequence takes on each GPU of a generator."""
    of_all = kv_bytes_per_token(shape, config.model) * config.sampling.max_tokens
    return -(-of_all // config.generator.tensor_parallel)


def exported_bytes(shape: ModelShape, model: ModelConfig) -> int:
    """Bytes of an export of the policy: of an adapter, that alone."""
    return (shape.adapter or shape.parameters) * DTYPE_BYTES[model.dtype]
