"""What a learner says when its GPU has no memory left."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.config.sections import LearnerConfig
from asyncrl.errors import MemoryFullError, lacks_gpu_memory
from asyncrl.hosting.progress import doing


@contextmanager
def naming_memory(learner: LearnerConfig, rank: int) -> Iterator[None]:
    """Raise MemoryFullError with the keys to change in place of torch's error, also at the start."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_gpu_memory(error):
            raise
        keys = [f"lower learner.tokens_per_microbatch ({learner.tokens_per_microbatch})"]
        keys += [f"learner.logprob_chunk_tokens ({learner.logprob_chunk_tokens})"]
        if learner.gradient_checkpointing is not True:
            keys += ["set learner.gradient_checkpointing: true"]
        keys += ["give generators on the same GPU a smaller generator.gpu_memory_utilization"]
        if not learner.offload_optimizer:
            keys += ["in a new run set learner.offload_optimizer: true with learner.zero_stage: 3"]
        raise MemoryFullError(
            f"rank {rank} of the learner was at {doing()!r} ({str(error).splitlines()[0]}). The same step "
            f"would need as much again: {', '.join(keys)}; `asyncrl plan` shows what takes how much. Then "
            "`asyncrl up` resumes the run"
        ) from error
