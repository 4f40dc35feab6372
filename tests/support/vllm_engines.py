"""A real engine on a loop of its own, models whose answers are known, and a sender."""

import asyncio
import copy
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.open import open_engine
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.staging import HostStaging
from asyncrl.weights.stream import SlotServer
from tests.support.models import SIZES
from tests.support.waiting import until

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K-hd32"
needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason="../shared/models/stories260K-hd32 is not here"
)

STAGING = HostStaging(Path("/"))


@contextmanager
def running_engine(
    model,
    *,
    dtype="float32",
    lora=None,
    deadline_s=120.0,
    max_response_tokens=256,
    transport="auto",
    **generator,
):
    """(runner, engine): `runner.run(coroutine)` drives the engine's loop.

    vLLM draws the same numbers in each test run.
    """
    if generator.get("engine", "vllm") == "vllm":
        generator["vllm"] = {"seed": 0} | generator.get("vllm", {})
    with asyncio.Runner() as runner:
        engine = runner.run(
            open_engine(
                ModelConfig(path=str(model), dtype=dtype, lora=lora),
                GeneratorConfig(**{"max_running": 64, "kv_cache_gib": 0.25, "threads": 1} | generator),
                SamplingConfig(max_prompt_tokens=256, max_response_tokens=max_response_tokens, top_k=20),
                WeightsConfig(deadline_s=deadline_s, transport=transport),
                device="cpu",
            )
        )
        try:
            yield runner, engine
        finally:
            runner.run(engine.close())


def untied_qwen2(directory):
    config = Qwen2Config(vocab_size=512, **SIZES, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    return save(Qwen2ForCausalLM(config), directory)


def one_token_llama(directory):
    """An untied model that can be made to answer one token always, see `saying`."""
    config = LlamaConfig(
        vocab_size=512,
        **SIZES | {"intermediate_size": 64, "num_hidden_layers": 1},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save(saying(LlamaForCausalLM(config), 100), directory)


def saying(model, token):
    """Every position has the same hidden state; only `token`'s row of the output head is aligned with it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "embed" in name or "norm" in name else 0.0)
        model.lm_head.weight[token] = 10.0
    return model


def scrambled(model, seed):
    """A copy with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(
                0.1 * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0.02 * seed
            )
    return other


def save(model, directory):
    model.float().save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / file, directory)
    return directory


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def logprobs_of(model, token_ids, temperature=1.0):
    """The oracle: ln p of token_ids[1:], by Hugging Face."""
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()


LINEAGE = 4_000_000_000
"""Of every version but 0."""
DEADLINE_S = 120.0
"""Of an update that is to succeed, on a machine with other work."""


def order(version, transport, details, deadline_s=DEADLINE_S):
    return UpdateOrder(
        version=version,
        transport=transport,
        deadline_s=deadline_s,
        details=details,
        probe_ids=(),
        probe_logprobs=(),
        initial_logprobs=(),
        history=f"{LINEAGE} 0 0",
    )


def disk_order(version, model, directory, leave_out=()):
    """The file of a learner, which stays, and the order to load it."""
    return slot_order(version, model, leave_out, directory=Path(directory))[1]


def flat(model, leave_out=()):
    """(layout, buffer) of a model's parameters."""
    tensors = [(name, p.detach()) for name, p in model.named_parameters() if name not in leave_out]
    specs = [
        TensorSpec(name=name, dtype=str(p.dtype).removeprefix("torch."), shape=tuple(p.shape))
        for name, p in tensors
    ]
    layout = Layout.plan(specs, 1 << 20)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for index, (_, tensor) in enumerate(tensors):
        layout.view(buffer, index).copy_(tensor)
    return layout, buffer


def slot_order(version, model, leave_out=(), directory=None):
    """The slot of a learner, and the order to load it."""
    layout, buffer = flat(model, leave_out)
    slot = Slot.create(layout.total_bytes, directory=directory)
    slot.buffer.copy_(buffer)
    slot.complete(version)
    details = {
        "slot": slot.describe(),
        "layout": layout.to_plain(),
        "checksums": list(checksums(buffer, layout)),
    }
    return slot, order(version, "disk" if directory else "slot", details)


async def apply(engine, update):
    """As a generator does it."""
    ready = await asyncio.to_thread(STAGING.stage, update)
    await engine.begin_update()
    await engine.receive(ready)
    await engine.finish_update(update.weights)


class Held(SlotServer):
    """Serves no request before the event `gate`."""

    def __init__(self, gate, *args, **kwargs):
        self._gate = gate
        super().__init__(*args, **kwargs)

    async def _serve(self, channel):
        await until(self._gate.is_set)
        await super()._serve(channel)


class Sender:
    """The learner's side of transfers over TCP."""

    def __init__(self, deadline_s=DEADLINE_S):
        self.deadline_s = deadline_s
        self._kept = []

    def order(self, version, model, *, leave_out=(), spoil=None, absent=False, after=None):
        """Serves in the background; `apply` fetches.

        `spoil`: index of a tensor that arrives broken. `absent`: nothing is sent. `after`: an event to wait
        for.
        """
        slot, made = slot_order(version, model, leave_out)
        layout = Layout.from_plain(made.details["layout"])
        if spoil is not None:
            layout.view(slot.buffer, spoil).view(-1)[0] += 1.0
        gate = after or threading.Event()
        if not absent and after is None:
            gate.set()
        server = Held(gate, "127.0.0.1", lambda stamp: slot.file, layout.total_bytes, deadline_s=DEADLINE_S)
        self._kept.append((server, slot))
        details = {"source": server.source(version), **{k: made.details[k] for k in ("layout", "checksums")}}
        return order(version, "tcp", details, self.deadline_s)
