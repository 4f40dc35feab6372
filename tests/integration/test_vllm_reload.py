"""A reload wants the parameters that a model was built with; a worker that does not answer ends the generator."""

import asyncio

import pytest
import torch
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from asyncrl.engine.vllm import engine as vllm_engine
from asyncrl.engine.vllm.layerwise import reloading
from asyncrl.errors import EngineError, TransferError
from asyncrl.lineage import Weights
from tests.support.vllm_engines import order
from tests.support.vllm_models import COARSE, CONFIG, Model

pytestmark = pytest.mark.integration


@pytest.fixture
def model():
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    record_metadata_for_reloading(model)
    model.down.quant_method.process_weights_after_loading(model.down)  # as after the first load
    del model.attention.k_scale
    return model


def sent(seed, *names):
    torch.manual_seed(seed)
    return {name: torch.randn(8, 8) for name in names}


def test_a_module_that_makes_its_own_scale_is_updated_again_and_again(model):
    addresses = [model.down.weight.data_ptr(), model.down.weight_scale.data_ptr()]
    for version in (1, 2, 3):
        weights = sent(version, "embed.weight", "down.weight")
        with reloading(model, CONFIG):
            model.load_weights(weights.items())
        assert torch.equal(model.embed.weight, weights["embed.weight"])
        assert model.head.weight is model.embed.weight
        scale = weights["down.weight"].abs().max() / COARSE
        assert model.down.weight_scale.item() == scale.item()
        assert torch.equal(model.down.weight.float(), (weights["down.weight"] / scale).round())
        # A CUDA graph goes on reading where it was recorded.
        assert [model.down.weight.data_ptr(), model.down.weight_scale.data_ptr()] == addresses


def test_what_is_missing_is_said_in_the_names_that_are_sent_and_the_kernels_keep_their_tensors(model):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with (
        pytest.raises(TransferError, match=r"1 of 2 parameters were not sent, first 'down\.weight'"),
        reloading(model, CONFIG),
    ):
        model.load_weights(sent(1, "embed.weight").items())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert torch.equal(after["down.weight"], before["down.weight"])
    assert torch.equal(after["down.weight_scale"], before["down.weight_scale"])


def test_a_model_that_does_not_say_what_it_has_loaded_is_refused(model):
    model.__class__ = type("Silent", (Model,), {"load_weights": lambda self, weights: None})
    with (
        pytest.raises(TransferError, match="Silent does not say which parameters it has loaded"),
        reloading(model, CONFIG),
    ):
        model.load_weights(sent(1, "embed.weight", "down.weight").items())


class Answers:
    """vLLM's AsyncLLM, as far as an update uses it; answers in turn with nothing, silence or an error."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def collective_rpc(self, method, *, args):
        if (answer := self.answers.pop(0)) == "silence":
            await asyncio.Event().wait()
        if answer == "error":
            return ["", "a worker's text"]
        return ["", ""]


def outcomes(monkeypatch, *answers):
    monkeypatch.setattr(vllm_engine, "_GRACE_S", 0.0)
    engine = vllm_engine.VLLMEngine(Answers(*answers), deadline_s=60.0, recompute_kv=False)
    engine._paused_since_s = 0.0
    found = []
    for version in range(len(answers)):
        try:
            asyncio.run(engine.receive(order(version, "disk", {}, deadline_s=0.05)))
            found.append("received")
        except (TransferError, EngineError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return [text.partition(":")[0] for text in found], found[-1]


def test_a_worker_that_leaves_two_updates_in_a_row_unanswered_ends_the_generator(monkeypatch):
    kinds, last = outcomes(monkeypatch, "silence", "silence")
    assert kinds == ["TransferError", "EngineError"]
    assert "weights of version 1 over disk: not loaded within 0.05 s, like 1 before" in last
    assert "restart the generator" in last


@pytest.mark.parametrize("between", ["", "error"])
def test_an_answer_between_them_counts_whatever_it_says(monkeypatch, between):
    kinds, _ = outcomes(monkeypatch, "silence", between, "silence")
    assert kinds == ["TransferError", "TransferError" if between else "received", "TransferError"]


class Waits:
    """As AsyncLLM, but the first of two calls is answered after the second."""

    def __init__(self):
        self.calls, self._resumed = [], asyncio.Event()

    async def update_weight_version(self, version):
        self.calls.append(version)
        await self._resumed.wait()

    async def resume_generation(self):
        self.calls.append("resume")
        self._resumed.set()


def test_a_version_has_its_label_before_requests_run_and_nothing_waits_for_the_answer():
    engine = vllm_engine.VLLMEngine(llm := Waits(), deadline_s=5.0, recompute_kv=False)
    engine._paused_since_s, engine._received = 0.0, True
    asyncio.run(engine.finish_update(Weights(3, 4)))
    assert llm.calls == [vllm_engine.label(Weights(3, 4)), "resume"]
    assert engine.weights == Weights(3, 4)
