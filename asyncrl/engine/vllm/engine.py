"""vLLM as the engine: one AsyncLLM in this process, its core and workers in child processes.

It serves no HTTP, because vLLM's routes for weight updates have no authentication.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray
from pydantic import ValidationError

from asyncrl.config.sections import GeneratorConfig, ModelConfig, SamplingConfig, WeightsConfig
from asyncrl.engine.base import Bookkeeping, Device, PromptImages, SamplingSpec, aborted
from asyncrl.engine.vllm.args import adapter_args, engine_args, fork_core, set_environment
from asyncrl.engine.vllm.outputs import label, to_rollout, token_logprobs
from asyncrl.errors import ConfigError, EngineError, ResultError, TransferError
from asyncrl.lineage import Weights
from asyncrl.lora import TENSORS, adapter_plan
from asyncrl.types import Rollout
from asyncrl.weights.base import UpdateOrder

log = logging.getLogger(__name__)
T = TypeVar("T")

# Added to the order's deadline, so that the receiver's own deadline passes first: its error says more.
_GRACE_S = 5.0
_CLOSE_S = 5.0
_POLL_S = 0.2
# Updates in a row without an answer after which the engine counts as stuck: further ones would queue behind.
_UNANSWERED = 2
# How pydantic calls what is no wrong type or unknown value, such as a model that could not be fetched.
_OTHER = "value_error"


class VLLMEngine(Bookkeeping):
    """The `Engine` interface on vLLM, made by `start`.

    The cache salt of a request is the number of weight updates before it, so it never reads prefix blocks
    that older weights have computed. A running request keeps its own KV cache through an update, and so does
    a conversation whose turns give the `salt` of its start, unless `generator.recompute_kv`.
    """

    def __init__(self, llm: Any, *, deadline_s: float, recompute_kv: bool) -> None:
        super().__init__()
        self._llm = llm
        self._deadline_s = deadline_s
        self._recompute_kv = recompute_kv
        self._adapter: Any = None  # which every request names
        self._unanswered = 0  # updates in a row
        self._trusted = True  # whether loads may repeat recorded copies
        self._request_ids = itertools.count()

    @classmethod
    async def start(
        cls,
        model: ModelConfig,
        generator: GeneratorConfig,
        sampling: SamplingConfig,
        weights: WeightsConfig,
        *,
        device: Device,
    ) -> Self:
        """Load the model as `open_engine` says, which takes about half a minute.

        Raises ConfigError also if vLLM cannot serve the adapter of `model.lora`.
        """
        set_environment(generator, device=device)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            given = engine_args(model, generator, sampling, weights, device=device)
            if (lora := model.served_adapter) is not None:
                plan = adapter_plan(model, lora)
                given |= adapter_args(plan[0])
            arguments = AsyncEngineArgs(**given)
            settings = arguments.create_engine_config()
            # After vLLM, which on CPUs has just chosen to spawn it.
            fork_core(given.get("distributed_executor_backend"))
            # vLLM keeps a reference to this frame; a local variable would keep the AsyncLLM alive.
            engine = cls(
                AsyncLLM.from_vllm_config(settings, disable_log_stats=arguments.disable_log_stats),
                deadline_s=weights.deadline_s,
                recompute_kv=generator.recompute_kv,
            )
        except ConfigError:
            raise
        except Exception as error:
            text = str(error)
            if isinstance(error, ValidationError):
                wrong = [
                    f"{'.'.join(map(str, each['loc']))}: {each['msg']}, found {each['input']!r}"
                    for each in error.errors()
                    if each["type"] != _OTHER
                ]
                if wrong:
                    found = f"vLLM refuses its arguments; correct generator.vllm: {'; '.join(wrong)}"
                    raise ConfigError(found) from error
                text = "; ".join(each["msg"] for each in error.errors())
            raise EngineError(f"vLLM did not start with model {model.path!r} on {device}: {text}") from error
        labelled = engine._llm.update_weight_version(label(engine.weights))
        await engine._call(labelled, "label the first weights")
        if lora is not None:
            from asyncrl.engine.vllm.adapter import REQUEST

            start = "" if lora.start is None else str(lora.start / TENSORS)
            try:
                await engine._call(engine._in_workers("open_adapter", *plan, start), "open the adapter")
            except TransferError as error:
                await engine.close()
                raise ConfigError(str(error)) from None
            engine._adapter = REQUEST
        return engine

    # --- sampling ---------------------------------------------------------------------------------

    async def sample(
        self,
        prompt_ids: Sequence[int],
        count: int,
        spec: SamplingSpec,
        *,
        salt: str | None = None,
        images: PromptImages | None = None,
    ) -> list[Rollout]:
        task = asyncio.create_task(self._sample(prompt_ids, count, spec, salt, images))
        self._running[task] = count
        task.add_done_callback(self._running.pop)
        try:
            while not (await asyncio.wait({task}, timeout=self._deadline_s))[0]:
                if self._paused_since_s is None:  # while receiving, another deadline applies
                    await self._call(self._llm.is_paused(), "say whether it is alive")
        finally:
            task.cancel()  # has an effect only if the caller was cancelled or the engine hangs
        if task.cancelled():
            raise aborted()
        return task.result()

    async def _sample(
        self,
        prompt_ids: Sequence[int],
        count: int,
        spec: SamplingSpec,
        salt: str | None,
        images: PromptImages | None,
    ) -> list[Rollout]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=count,
            temperature=spec.temperature,
            max_tokens=spec.max_response_tokens,
            stop=list(spec.stop),
            top_k=spec.top_k,
            top_p=spec.top_p,
            min_p=spec.min_p,
            logprobs=min(spec.top_k, self._llm.model_config.get_vocab_size()) if spec.is_truncated else 0,
            flat_logprobs=True,
            detokenize=bool(spec.stop),
            skip_special_tokens=False,  # the text is read for `stop` only, which may be a special token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._generate(prompt_ids, params, None if self._recompute_kv else salt, images)
        rollouts = [to_rollout(prompt_ids, completion, spec.is_truncated) for completion in output.outputs]
        self._sampled_tokens += sum(len(rollout.response_ids) for rollout in rollouts)
        return rollouts

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        from vllm import SamplingParams

        if self._paused_since_s is not None:
            raise EngineError("score: the engine is paused for a weight update; finish the update first")
        params = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        output = await self._call(self._generate(token_ids, params), f"score {len(token_ids)} tokens")
        return token_logprobs(output.prompt_logprobs, token_ids)[1:]

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        params: Any,
        salt: str | None = None,
        images: PromptImages | None = None,
    ) -> Any:
        """The final output of one request."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt, tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        prompt: Any = tokens_input(list(prompt_ids), cache_salt=salt or self.salt)
        if images is not None:
            # vLLM writes the placeholders, and keeps by its name what the frozen tower makes of an image.
            prompt = TokensPrompt(
                prompt_token_ids=list(images.short_ids),
                multi_modal_data={"image": list(images.pictures)},
                multi_modal_uuids={"image": [f"{digest:016x}" for digest in images.digests.tolist()]},
                cache_salt=salt or self.salt,
            )
        output: Any = None
        try:
            with _alive():
                async for newest in self._llm.generate(
                    prompt, params, request_id=str(next(self._request_ids)), lora_request=self._adapter
                ):
                    output = newest
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise ResultError(
                f"vLLM refused a request of {len(prompt_ids)} prompt tokens: {error.__cause__ or error}"
            ) from error
        if images is not None and output.prompt_token_ids != list(prompt_ids):
            raise ResultError(
                f"vLLM made {len(output.prompt_token_ids)} tokens of a prompt with images, and the processor "
                f"of the model {len(prompt_ids)}: an image has changed, or vLLM's processor is another one"
            )
        return output

    async def abort_requests(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await self._call(asyncio.wait(tasks), f"drop {len(tasks)} requests")

    # --- weight updates ---------------------------------------------------------------------------

    async def begin_update(self) -> None:
        was_paused = self._paused_since_s is not None
        await super().begin_update()
        if was_paused:
            return
        # `pause_generation` would sleep for 20 ms, which only readers of streamed outputs need.
        pause = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._call(pause, "pause its requests")
        if self._recompute_kv:  # `clear_cache` would drop images, too, which are sent to vLLM's core once
            await self._call(self._llm.reset_prefix_cache(reset_running_requests=True), "forget its cache")

    async def receive(self, order: UpdateOrder) -> None:
        if self._paused_since_s is None:
            raise EngineError("receive: requests are running; begin the update first")
        where = f"weights of version {order.version} over {order.transport}"
        try:
            async with asyncio.timeout(order.deadline_s + _GRACE_S):
                with _alive():
                    await self._in_workers("load_version", order.target, order.details, self._trusted)
        except TimeoutError as error:
            self._unanswered += 1
            late = f"{where}: not loaded within {order.deadline_s:g} s"
            if self._unanswered >= _UNANSWERED:
                raise EngineError(
                    f"{late}, like {self._unanswered - 1} before; a worker of vLLM hangs, or "
                    "weights.deadline_s is too short: restart the generator"
                ) from error
            raise TransferError(f"{late}; they are incomplete, send them again") from error
        except EngineError:
            raise
        except Exception as error:  # also vLLM's own, which are plain
            self._unanswered = 0
            raise TransferError(f"{where}: {error}; they are incomplete, send them again") from error
        self._unanswered, self._received = 0, True

    async def _in_workers(self, method: str, *arguments: Any) -> None:
        """Call a method of `VersionLoader` in each worker. Raises TransferError with what they return."""
        failures = filter(None, await self._llm.collective_rpc(method, args=arguments))
        if said := "; ".join(dict.fromkeys(failures)):
            raise TransferError(said)

    def distrust(self) -> None:
        if self._trusted:
            log.warning("vLLM reloads its model in its own way from now on, which is slower")
        self._trusted = False

    async def finish_update(self, weights: Weights) -> None:
        llm = self._llm
        with self.finishing(weights):
            # vLLM's engine process takes both calls in this order; to wait between them lengthens the pause.
            calls = asyncio.gather(llm.update_weight_version(label(weights)), llm.resume_generation())
            await self._call(calls, f"label its weights {weights} and resume its requests")

    # --- the processes ----------------------------------------------------------------------------

    async def progress(self) -> None:
        """Wait without a bound: an engine that receives weights answers only afterwards."""
        before = self._sampled()
        while self._running and self._paused_since_s is None:
            await asyncio.sleep(_POLL_S)
            if self._sampled() != before:
                return
        with _alive():
            await self._llm.is_paused()

    def _sampled(self) -> tuple[int, int]:
        """Tokens of ended requests, and of running ones, from vLLM's internal request states."""
        states = self._llm.output_processor.request_states.values()
        return self._sampled_tokens, sum(state.detokenizer.num_output_tokens() for state in states)

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        llm, self._llm = self._llm, None  # its finalizer would fail after vLLM's modules are gone
        processes = []  # the engine's core and its workers
        manager = llm.engine_core.resources.engine_manager
        for core in manager.processes if manager is not None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(core.pid)
                processes += [*process.children(recursive=True), process]
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # otherwise it would report the end of the engine as a crash
        await asyncio.to_thread(llm.shutdown, _CLOSE_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, processes, _CLOSE_S)

    async def _call(self, call: Awaitable[T], what: str) -> T:
        """The result of `call`, which tells the engine process to do `what`. Raises EngineError."""
        try:
            # `wait_for` of Python 3.11 forgets a cancellation.
            async with asyncio.timeout(self._deadline_s):
                with _alive():
                    return await call
        except TimeoutError as error:
            raise EngineError(
                f"vLLM's engine process did not {what} within {self._deadline_s:g} s; restart the generator"
            ) from error


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Raise EngineError in place of vLLM's exception if its engine process has died."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        text = "vLLM's engine process has died; its log says why, and the generator must be restarted"
        raise EngineError(text) from error
