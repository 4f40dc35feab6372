"""The memory that a rank of the learner and a generator need, computed before anything is loaded.

N parameters, b bytes of the model's dtype, R ranks. AdamW keeps two float32 moments. In bfloat16, and with
any ZeRO stage above 0, there is a float32 master copy, too. ZeRO 1 shards master copy and moments, 2 also the
accumulated gradients, 3 also the weights. With `model.lora`, all but the weights are of the adapter only. A
vision part is frozen, and has weights only.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from asyncrl.config.schema import Config
from asyncrl.config.sections import GeneratorConfig, LearnerConfig, ModelConfig, WeightsConfig

FP32 = 4  # bytes
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS_BYTES = 2 * FP32
# DeepSpeed reduces gradients in buckets of this many numbers, and in ZeRO 3 has this many gathered weights.
BUCKET_NUMBERS, GATHERED_WEIGHTS = 500_000_000, 1_000_000_000
# In ZeRO 3 the optimizer takes this many of a rank's numbers at a time: DeepSpeed's `sub_group_size`.
STEPPED_NUMBERS = 1_000_000_000
# Logits of a chunk, their exponentials and gradients, in float32.
LOGIT_COPIES = 3
# Gradients of the output layer's weight, in float32: the sum over chunks, and that of one chunk.
HEAD_COPIES = 2
# Names of two parts of `rank_bytes`.
SLOTS, CUDA = "published versions", "CUDA"
# KV cache of a generator on a CPU whose config names no size.
CPU_KV_CACHE_GIB = 1.0
# Of a process on a GPU: CUDA's context, the libraries' workspaces, NCCL's buffers.
CONTEXT_BYTES = 1 << 30
# Buffers of one communicator of NCCL: an estimate, no GPU has measured it.
COMMUNICATOR_BYTES = 410 << 20
# Buckets of received weights are multiples of this, and at least one: `weights.layout.Layout.pieces`.
BUCKET_STEP_BYTES = 16 << 20
# What a generator's engine needs besides weights and KV cache: context, CUDA graphs, activations; and its
# sampler per running sequence, in copies of the logits.
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

    @classmethod
    def of(cls, config: Any, parameters: int, *, adapter: int = 0, frozen: int = 0) -> Self:
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
            adapter=adapter,
            frozen=frozen,
        )

    @property
    def trained(self) -> int:
        """How many numbers have a gradient."""
        return self.adapter or self.parameters - self.frozen


def zero_stage(wanted: int, dtype: str) -> int:
    """The ZeRO stage, but 1 instead of 0 in bfloat16: only ZeRO keeps AdamW's float32 master weights."""
    return 1 if wanted == 0 and dtype == "bfloat16" else wanted


def weights_bytes(shape: ModelShape, model: ModelConfig) -> int:
    """One copy of the weights: N b."""
    return shape.parameters * DTYPE_BYTES[model.dtype]


def published_bytes(shape: ModelShape, model: ModelConfig) -> int:
    """One published version: the weights without those of a vision part, or the adapter."""
    numbers = shape.adapter if model.update_target == "adapter" else shape.parameters - shape.frozen
    return numbers * DTYPE_BYTES[model.dtype]


def trained_bytes(shape: ModelShape, model: ModelConfig, learner: LearnerConfig) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer of one model on one rank, at the peak of its step.

    Gradients of one backward pass and the accumulated ones are the same tensors only in float32 below ZeRO 2.
    """
    parameters, stage = shape.trained, zero_stage(learner.zero_stage, model.dtype)
    gradients, optimizer = pass_bytes(shape, model, learner), 0
    if not learner.offload_optimizer:
        gradients += _share(parameters * FP32, learner, divided=stage >= 2)
        master = parameters * FP32 if stage > 0 else 0
        optimizer = _share(parameters * MOMENTS_BYTES + master, learner, divided=stage >= 1)
    all_bytes = (shape.parameters + shape.adapter) * DTYPE_BYTES[model.dtype]
    weights = _share(all_bytes, learner, divided=stage == 3)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def _share(size_bytes: int, learner: LearnerConfig, *, divided: bool) -> int:
    """Return what one rank has of it."""
    return -(-size_bytes // learner.ranks) if divided else size_bytes


def pass_bytes(shape: ModelShape, model: ModelConfig, learner: LearnerConfig) -> int:
    """Bytes of the gradients of one backward pass that are not the accumulated ones."""
    stage = zero_stage(learner.zero_stage, model.dtype)
    if stage < 2 and model.dtype == "float32":
        return 0
    return _share(shape.trained * DTYPE_BYTES[model.dtype], learner, divided=stage == 3)


def head_bytes(shape: ModelShape, model: ModelConfig, learner: LearnerConfig) -> int:
    """What the output layer's gradient adds; it is the first of a backward pass, when all activations exist.

    From ZeRO 2 on, it takes the place of the others, because those of the last pass are gone by then. With an
    adapter, the output layer has none.
    """
    if shape.adapter:
        return 0
    size_bytes = HEAD_COPIES * shape.vocabulary * shape.hidden * FP32
    if zero_stage(learner.zero_stage, model.dtype) < 2:
        return size_bytes
    return max(0, size_bytes - pass_bytes(shape, model, learner))


def resting_bytes(shape: ModelShape, model: ModelConfig, learner: LearnerConfig) -> int:
    """Bytes that one model keeps on one rank while another takes its step.

    DeepSpeed keeps the accumulated gradients in bfloat16, except in ZeRO 2, and in ZeRO 3 always; in ZeRO 3
    also the bucket of each engine.
    """
    parts, stage = trained_bytes(shape, model, learner), zero_stage(learner.zero_stage, model.dtype)
    resting = parts["weights"] + parts["optimizer"]
    if not learner.offload_optimizer and (stage == 3 or (stage < 2 and model.dtype == "bfloat16")):
        resting += _share(shape.trained * FP32, learner, divided=stage == 3)
    return resting + (_bucket_bytes(shape, model) if stage == 3 else 0)


def rank_bytes(
    shape: ModelShape,
    model: ModelConfig,
    learner: LearnerConfig,
    *,
    reference: ModelShape | None,
    critic: bool,
    on_gpu: bool,
    slots: int,
) -> dict[str, int]:
    """Bytes that the first rank of the learner needs, by part; others need no published versions, of which
    this one has `slots` on its GPU.
    """
    parts = trained_bytes(shape, model, learner)
    found = {"learner weights": parts["weights"]}
    found |= {name: parts[name] for name in ("gradients", "optimizer")}
    found["activations"] = activations_bytes(shape, model, learner)
    found["output layer"] = head_bytes(shape, model, learner)
    found["buffers"] = buffers_bytes(shape, model, learner)
    if reference:
        found["reference"] = trained_bytes(reference, model, learner)["weights"]
    if critic:
        found["critic"] = resting_bytes(shape, model, learner)
    return found | ({SLOTS: slots * published_bytes(shape, model), CUDA: CONTEXT_BYTES} if on_gpu else {})


def buffers_bytes(shape: ModelShape, model: ModelConfig, learner: LearnerConfig) -> int:
    """What DeepSpeed adds: a bucket of gradients, and in ZeRO 3 the weights that are gathered at a time.

    Without ZeRO, and in ZeRO 1 with bfloat16, a bucket is made after the last backward pass, when the
    activations are gone. So is the copy of gradients that ZeRO 3 makes for the optimizer in bfloat16.
    """
    bucket, stage = _bucket_bytes(shape, model), zero_stage(learner.zero_stage, model.dtype)
    if stage == 0 or (stage == 1 and model.dtype == "bfloat16"):
        return max(0, bucket - activations_bytes(shape, model, learner))
    gathered = min(shape.parameters, GATHERED_WEIGHTS) if stage == 3 and learner.ranks > 1 else 0
    gathered *= DTYPE_BYTES[model.dtype]
    if stage == 3 and model.dtype == "bfloat16" and not learner.offload_optimizer:
        copied = min(-(-shape.trained // learner.ranks), STEPPED_NUMBERS) * FP32
        gathered = max(gathered, copied - activations_bytes(shape, model, learner))
    return bucket + gathered


def _bucket_bytes(shape: ModelShape, model: ModelConfig) -> int:
    return min(shape.trained, BUCKET_NUMBERS) * DTYPE_BYTES[model.dtype]


def torch_bytes(parts: dict[str, int], *, rank: int) -> int:
    """What torch allocates of these parts of `rank_bytes`, on the GPU of that rank."""
    return sum(parts.values()) - parts[CUDA] - (parts[SLOTS] if rank else 0)


def offloaded_bytes(shape: ModelShape, learner: LearnerConfig) -> int:
    """Bytes of host memory of all ranks for one trained model: the float32 gradients, master copy and moments
    that `learner.offload_optimizer` keeps there instead of on the GPUs. DeepSpeed has the gradients twice.
    """
    return shape.trained * (3 * FP32 + MOMENTS_BYTES) if learner.offload_optimizer else 0


def activations_bytes(shape: ModelShape, model: ModelConfig, learner: LearnerConfig) -> int:
    """Bytes that one rank keeps of a full packed micro-batch for the backward pass, and a chunk of logits.

    Layers that were not counted are taken for Llama's; the last norm keeps as much as those of the layers.
    """
    tokens = -(-learner.tokens_per_microbatch // learner.sequence_parallel)
    if (kept := shape.kept_per_token) is None:
        layer = kept_bytes_per_token(shape, model)
        kept = kept_at_peak(shape, model, learner.gradient_checkpointing, layer_bytes=layer)
        kept += _norm_bytes(shape, model)
    logits = min(learner.logprob_chunk_tokens, tokens) * shape.vocabulary * LOGIT_COPIES * FP32
    return tokens * kept + logits


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


def checkpoint_bytes(shape: ModelShape, model: ModelConfig, *, critic: bool) -> int:
    """Bytes on disk: weights or adapter, master copy if there is one, moments, export of the whole."""
    master, size = FP32 if model.dtype == "bfloat16" else 0, DTYPE_BYTES[model.dtype]
    exported = (shape.adapter or shape.parameters) * size
    return shape.trained * (size + master + MOMENTS_BYTES) * (2 if critic else 1) + exported
