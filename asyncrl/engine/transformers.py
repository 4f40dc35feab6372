"""transformers as the engine: `generate` in a thread of this process, for a machine without vLLM.

A request is one batch, and requests run one after the other. An update waits for the end of a forward pass;
then the request goes on with its KV cache and the new weights, and each token names the weights whose forward
pass gave its distribution. vLLM samples many times faster.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, generation

from asyncrl.columns import EXPERTS, KEPT_COUNTS, KEPT_IDS
from asyncrl.config.sections import GeneratorConfig, ModelConfig, WeightsConfig
from asyncrl.engine import base
from asyncrl.engine.base import Bookkeeping, Device, PromptImages, SamplingSpec, aborted
from asyncrl.errors import ConfigError, EngineError, ResultError, TransferError
from asyncrl.hosting.machine import freeze_vision, model_class
from asyncrl.lineage import Weights
from asyncrl.lora import adapter_tensors, base_arguments, inject
from asyncrl.routing import experts_of_tokens, recorded, watch
from asyncrl.types import Rollout, version_spans
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.layout import Layout, verify
from asyncrl.weights.slots import open_slot

_POLL_S = 0.2


class _Aborted(Exception):
    """Ends a request between two forward passes."""


class _Gate:
    """Lets the weights change only between two forward passes of the sampling thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_shut = self._is_computing = False

    def enter(self, request: "_Request") -> None:
        """Begin a forward pass once the gate is open. Raises _Aborted."""
        with self._changed:
            self._changed.wait_for(lambda: request.is_aborted or not self._is_shut)
            if request.is_aborted:
                raise _Aborted
            self._is_computing = True

    def leave(self) -> None:
        """End a forward pass."""
        with self._changed:
            self._is_computing = False
            self._changed.notify_all()

    def shut(self, within_s: float) -> bool:
        """Let no pass begin, and wait for the end of the present one; return whether it came in time."""
        with self._changed:
            self._is_shut = True
            return self._changed.wait_for(lambda: not self._is_computing, within_s)

    def open(self) -> None:
        """Let the next pass begin."""
        with self._changed:
            self._is_shut = False
            self._changed.notify_all()

    def abort(self, request: "_Request") -> None:
        """End a request before its next pass."""
        with self._changed:
            request.is_aborted = True
            self._changed.notify_all()


class _Request:
    """One call of `generate`: its logits processor and stopping criterion. B responses, V known tokens."""

    def __init__(
        self,
        engine: "TransformersEngine",
        prompt_ids: Sequence[int],
        count: int,
        spec: SamplingSpec,
        images: PromptImages | None,
    ) -> None:
        self.prompt_ids, self.count, self.spec = prompt_ids, count, spec
        self.inputs = images.inputs(count) if images is not None else {}
        self.is_aborted = False
        self.rollouts: asyncio.Future[list[Rollout]]
        self.sampled_by: list[Weights] = []
        self._engine = engine
        self._logprobs_BV: Tensor | None = None  # of the token to sample next
        self._logprobs: list[Tensor] = []
        self._kept: list[list[NDArray[np.int32]]] = []
        self._truncating: list[Any] = []
        if spec.is_truncated:
            self._truncating.append(generation.TopKLogitsWarper(spec.top_k))
            self._truncating.append(generation.TopPLogitsWarper(spec.top_p))
            self._truncating.append(generation.MinPLogitsWarper(spec.min_p))
        self._lengths_B = torch.zeros(count, dtype=torch.long)  # 0: not ended by itself
        self._stops = [generation.StopStringCriteria(engine.tokenizer, list(spec.stop))] if spec.stop else []

    def process(self, ids_BN: Tensor, logits_BV: Tensor) -> Tensor:
        """Return the log-probabilities to sample from; called between a forward pass and its sampling."""
        self._note(ids_BN)
        self.sampled_by.append(self._engine.computing_weights)
        self._engine.gate.leave()  # an update may load now
        self._engine.gate.enter(self)
        logits_BV = logits_BV.float() / (self.spec.temperature or 1.0)
        for truncate in self._truncating:
            logits_BV = truncate(ids_BN, logits_BV)
        self._logprobs_BV = logits_BV.log_softmax(-1)
        return self._logprobs_BV

    def _note(self, ids_BN: Tensor) -> None:
        if self._logprobs_BV is not None:
            self._logprobs.append(self._logprobs_BV.gather(-1, ids_BN[:, -1:]).squeeze(-1).cpu())
            if self._truncating:
                is_kept_BV = self._logprobs_BV.isfinite().cpu().numpy()
                self._kept.append([np.flatnonzero(row).astype(np.int32) for row in is_kept_BV])

    def ended(self, ids_BN: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return which responses have ended."""
        response_BT = ids_BN[:, len(self.prompt_ids) :]
        ended_B = torch.isin(response_BT[:, -1].cpu(), self._engine.stop_ids)
        for criterion in self._stops:
            ended_B |= criterion(response_BT, scores).cpu()
        self._lengths_B[ended_B & (self._lengths_B == 0)] = response_BT.shape[1]
        return (self._lengths_B > 0).to(ids_BN.device)

    def result(self, ids_BN: Tensor, choices: Sequence[Tensor]) -> list[Rollout]:
        """Return the result, from all that `generate` returns and that routers have chosen meanwhile."""
        self._note(ids_BN)
        experts_BNLK = (
            experts_of_tokens(choices, self._engine.routers, self.count).numpy() if choices else None
        )
        response_BT = ids_BN[:, len(self.prompt_ids) :].cpu().numpy().astype(np.int32)
        logprobs_BT = torch.stack(self._logprobs, dim=1).numpy()
        rollouts = []
        for row, ended in enumerate(self._lengths_B.tolist()):
            length = ended or response_BT.shape[1]
            recorded: dict[str, NDArray[Any]] = {}
            if experts_BNLK is not None:
                recorded[EXPERTS] = experts_BNLK[row, : len(self.prompt_ids) + length]
            if kept := [rows[row] for rows in self._kept[:length]]:
                recorded[KEPT_COUNTS] = np.array([len(ids) for ids in kept], dtype=np.int32)
                recorded[KEPT_IDS] = np.concatenate(kept)
            rollout = Rollout(
                prompt_ids=np.array(self.prompt_ids, dtype=np.int32),
                response_ids=response_BT[row, :length],
                action_mask=np.ones(length, dtype=np.bool_),
                behaviour_logprobs=logprobs_BT[row, :length],
                version_spans=version_spans(self.sampled_by[:length]),
                finish_reason="stop" if ended else "length",
                recorded=recorded,
            )
            rollouts.append(rollout)
        return rollouts


class TransformersEngine(Bookkeeping):
    """The `Engine` interface on `transformers.generate`, made by `start`."""

    def __init__(
        self, model: Any, tokenizer: Any, *, target: str, deadline_s: float, routers: int = 0
    ) -> None:
        """`routers` is the number of those whose choices are recorded."""
        super().__init__()
        self._model, self.tokenizer, self._deadline_s = model, tokenizer, deadline_s
        self.routers = routers
        self._target = target  # what an update replaces; a vision part is frozen
        trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
        self._replaced = dict(adapter_tensors(model) if target == "adapter" else trained)
        ends = model.generation_config.eos_token_id
        found = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        self.stop_ids = torch.tensor(sorted(found), dtype=torch.long)
        # The model's own would limit and shape the distribution, such as by top_k.
        model.generation_config = GenerationConfig()
        self.gate = _Gate()
        # The probe is scored where updates load, so that neither waits for requests, and one for the other.
        self._sampling, self._loading = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.computing_weights = Weights(0)

    @classmethod
    def start(
        cls, model: ModelConfig, generator: GeneratorConfig, weights: WeightsConfig, *, device: Device
    ) -> Self:
        """Load the model as version 0. Raises EngineError, and ConfigError for `model.lora`."""
        if generator.threads is not None:
            torch.set_num_threads(generator.threads)
        torch.seed()  # torch begins every process with the same seed
        bits = base_arguments(model, device)
        try:
            tokenizer = AutoTokenizer.from_pretrained(model.path, **model.hub_options)
            config = AutoConfig.from_pretrained(model.path, **model.hub_options)
            loaded = model_class(config).from_pretrained(
                model.path, dtype=getattr(torch, model.dtype), **model.hub_options | bits
            )
            if (lora := model.served_adapter) is not None:
                inject(loaded, lora)
            loaded = loaded.to(device).eval()
            freeze_vision(loaded)
        except ConfigError:
            raise
        except Exception as error:
            found = f"transformers cannot load model {model.path!r} on {device}"
            raise EngineError(f"{found}: {error}") from error
        head = loaded.get_output_embeddings()
        if model.dtype != "float32":
            # As in learner and vLLM: a bfloat16 logit between 8 and 16 is rounded to a step of 0.06.
            head.forward = lambda hidden: functional.linear(hidden.float(), head.weight.float(), head.bias)
        routers = len(watch(loaded)) if model.router_replay else 0
        return cls(
            loaded, tokenizer, target=model.update_target, deadline_s=weights.deadline_s, routers=routers
        )

    async def sample(
        self,
        prompt_ids: Sequence[int],
        count: int,
        spec: SamplingSpec,
        *,
        salt: str | None = None,
        images: PromptImages | None = None,
    ) -> list[Rollout]:
        # `salt` has no effect: no cache outlives a request.
        request = _Request(self, prompt_ids, count, spec, images)
        request.rollouts = asyncio.wrap_future(self._sampling.submit(self._generate, request))
        self._running[request] = count
        try:
            rollouts = await request.rollouts
        except _Aborted:
            raise aborted() from None
        except Exception as error:  # code of models raises what it likes, such as IndexError at a position
            found = f"transformers failed at a request of {len(prompt_ids)} prompt tokens"
            raise ResultError(f"{found}: {type(error).__name__}: {error}") from error
        finally:
            self.gate.abort(request)  # has an effect only if the caller was cancelled
            del self._running[request]
        self._sampled_tokens += sum(len(rollout.response_ids) for rollout in rollouts)
        return rollouts

    def _generate(self, request: _Request) -> list[Rollout]:
        ids_1N = torch.tensor([list(request.prompt_ids)], device=self._model.device)
        settings = GenerationConfig(
            do_sample=request.spec.temperature > 0,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=request.spec.max_response_tokens,
        )
        self.gate.enter(request)
        try:
            with recorded() as choices:
                ids_BN = self._model.generate(
                    ids_1N.expand(request.count, -1),
                    attention_mask=torch.ones_like(ids_1N).expand(request.count, -1),
                    **{name: tensor.to(self._model.device) for name, tensor in request.inputs.items()},
                    generation_config=settings,
                    logits_processor=[request.process],
                    stopping_criteria=[request.ended],
                )
        finally:
            self.gate.leave()
        return request.result(ids_BN, choices)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        if self._paused_since_s is not None:
            raise EngineError("score: the engine is paused for a weight update; finish the update first")

        @torch.no_grad()
        def score() -> NDArray[np.float32]:
            ids_1N = torch.tensor([list(token_ids)], device=self._model.device)
            logprobs_1NV = self._model(ids_1N).logits[:, :-1].float().log_softmax(-1)
            scores: NDArray[np.float32] = logprobs_1NV.gather(-1, ids_1N[:, 1:, None])[0, :, 0].cpu().numpy()
            return scores

        return await asyncio.wrap_future(self._loading.submit(score))

    async def begin_update(self) -> None:
        await super().begin_update()
        if not await asyncio.to_thread(self.gate.shut, self._deadline_s):
            raise self._late("a forward pass")

    async def receive(self, order: UpdateOrder) -> None:
        if self._paused_since_s is None:
            raise EngineError("receive: requests are running; begin the update first")
        where = f"weights of version {order.version} over {order.transport}"
        loaded = asyncio.wrap_future(self._loading.submit(self._load, order))
        try:
            async with asyncio.timeout(order.deadline_s):  # `wait_for` of Python 3.11 forgets a cancellation
                await loaded
        except TimeoutError as error:
            late = f"{where}: not loaded within {order.deadline_s:g} s"
            raise TransferError(f"{late}; they are incomplete, send them again") from error
        except (TransferError, RuntimeError) as error:
            raise TransferError(f"{where}: {error}; they are incomplete, send them again") from error
        self._received = True

    @torch.no_grad()
    def _load(self, order: UpdateOrder) -> None:
        base.require_target(order.target, self._target)
        layout, ours = Layout.from_plain(order.details["layout"]), self._replaced
        base.require_shapes(
            {spec.name: spec.shape for spec in layout.specs},
            {name: tuple(parameter.shape) for name, parameter in ours.items()},
        )
        device = self._model.device
        slot = open_slot(order.details["slot"], layout.total_bytes, device=device.index)
        # The generator's process has verified slots in memory of the host, and cannot read those on a GPU.
        if order.details["slot"]["exported"] is not None:
            verify(slot.buffer, layout, order.details["checksums"])
        for index, spec in enumerate(layout.specs):
            ours[spec.name].copy_(layout.view(slot.buffer, index))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slot.require_unchanged()

    async def finish_update(self, weights: Weights) -> None:
        with self.finishing(weights):
            self.computing_weights = weights
        self.gate.open()

    async def abort_requests(self) -> None:
        for request in self._running:
            self.gate.abort(request)
        awaited = [request.rollouts for request in self._running]
        if awaited and (await asyncio.wait(awaited, timeout=self._deadline_s))[1]:
            raise self._late("a request")

    def _late(self, what: str) -> EngineError:
        return EngineError(
            f"{what} of transformers did not end within {self._deadline_s:g} s; restart the generator"
        )

    async def progress(self) -> None:
        def passes() -> int:
            return sum(len(request.sampled_by) for request in self._running)

        before = passes()
        while self._running and self._paused_since_s is None and passes() == before:
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        with suppress(EngineError):
            await self.abort_requests()
        self._sampling.shutdown(wait=False)
        self._loading.shutdown(wait=False)
