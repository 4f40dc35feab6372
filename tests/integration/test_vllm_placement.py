"""A version that is copied to where vLLM's loaders would put it is bit for bit the one that vLLM's own reload
makes: parameters, buffers, and what layers with packed copies compute. Loaders that compute are left to vLLM."""

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from asyncrl.engine.vllm.layerwise import reloading
from asyncrl.engine.vllm.receiver import VersionLoader
from asyncrl.engine.vllm.recorded_load import learn
from asyncrl.weights import slots
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from tests.support.models import SIZES
from tests.support.vllm_models import CONFIG, Coarse, Model, built

pytestmark = pytest.mark.integration

WIDE = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 2},  # with biases
    "qwen3": WIDE | {"tie_word_embeddings": True},
    "gemma2": WIDE | {"query_pre_attn_scalar": 32},
    "gemma3_text": WIDE | {"query_pre_attn_scalar": 32},
    "phi3": {"pad_token_id": 0, "num_key_value_heads": 2},  # fused in the checkpoint
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},  # a loader for each expert
}
VOCABULARY = 100
"""vLLM pads it to 128."""


def saved(kind, directory):
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **SIZES | MODELS[kind])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return directory


def versions(directory, count):
    """Versions of the checkpoint's tensors, random numbers in one buffer each, and what they are."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        specs = specs_of({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    torch.manual_seed(0)
    layout, made = Layout.plan(specs, 1 << 20), []
    for _ in range(count):
        buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        made.append({spec.name: layout.view(buffer, index) for index, spec in enumerate(specs)})
        for tensor in made[-1].values():
            tensor.copy_(torch.randn(tensor.shape))
    return made, specs


def specs_of(weights):
    return tuple(
        TensorSpec(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
        for name, t in weights.items()
    )


def observed(model):
    """Copies of all tensors, and what each layer with a packed copy makes of some input."""
    found = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for path, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and layer.cpu_linear is not nn.functional.linear:
            inputs = torch.linspace(-1, 1, 3 * SIZES["intermediate_size"])[: 3 * width(layer)].view(3, -1)
            found[f"{path}()"] = layer.cpu_linear(inputs, layer.weight, None)
    return found


def width(layer):
    return getattr(layer, "input_size_per_partition", SIZES["hidden_size"])


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("on", ["a CPU", "rank 1 of 2 GPUs"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_the_one_that_vllms_reload_makes(kind, on, tmp_path):
    as_on = {"a CPU": {}, "rank 1 of 2 GPUs": {"packed": False, "rank": 1, "ranks": 2}}[on]
    with built(saved(kind, tmp_path), **as_on) as (model, config):
        (first, second), specs = versions(tmp_path, 2)
        expected = []
        for weights in (first, second):
            with reloading(model, config):
                model.load_weights(weights.items())
            expected.append(observed(model))
        addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        placement = learn(model, specs)
        assert_same(observed(model), expected[1])
        for _ in range(2):
            for weights, right in zip((first, second), expected, strict=True):
                placement.load(weights, config)
                assert_same(observed(model), right)
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
        if on != "a CPU" and kind != "mixtral":  # whose kernels want the experts in another order
            with Counted() as counted:
                placement.load(first, config)
            assert counted.copies == sum(
                write.source is not None for placed in placement.layers for write in placed.writes
            )
        # vLLM's own reload still works behind it, and the other way round.
        with reloading(model, config):
            model.load_weights(first.items())
        assert_same(observed(model), expected[0])
        placement.load(second, config)
        assert_same(observed(model), expected[1])


def test_a_worker_that_repeats_wrong_copies_loads_rightly_when_it_is_told_not_to(tmp_path):
    with built(saved("llama", tmp_path)) as (model, config):
        (first, second), specs = versions(tmp_path, 2)
        with reloading(model, config):
            model.load_weights(second.items())
        right = observed(model)
        layout = Layout.plan(specs, 1 << 20)
        worker = SimpleNamespace(
            vllm_config=get_current_vllm_config(),
            device=torch.device("cpu"),
            get_model=lambda: model,
            learned=VersionLoader.learned,
            adapter=None,
        )

        def update(weights, *, repeats):
            slot = Slot.create(layout.total_bytes)
            for index, spec in enumerate(specs):
                layout.view(slot.buffer, index).copy_(weights[spec.name])
            slot.complete(1)
            details = {"layout": layout.to_plain(), "slot": slot.describe()}
            assert VersionLoader.load_version(worker, "weights", details, repeats) == ""
            slot.close()

        update(first, repeats=True)
        worker.learned[2].layers[0].writes.clear()
        update(second, repeats=True)
        assert any(not torch.equal(found, right[name]) for name, found in observed(model).items())
        update(second, repeats=False)
        assert_same(observed(model), right)


def test_a_slot_on_a_gpu_is_verified_before_anything_is_loaded(tmp_path, monkeypatch):
    """Memory of this process stands for the learner's GPU."""
    with built(saved("llama", tmp_path)) as (model, _):
        (first, second), specs = versions(tmp_path, 2)
        layout = Layout.plan(specs, 1 << 20)
        memory = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        monkeypatch.setattr(slots, "_import", lambda exported, device: memory)
        slot = Slot(memory, file=os.memfd_create("stamp"), _exported=[*[None] * 7, b"handle", 0, 0])
        slot._path = f"/proc/{os.getpid()}/fd/{slot.file}"
        worker = SimpleNamespace(
            vllm_config=get_current_vllm_config(),
            device=torch.device("cpu"),
            get_model=lambda: model,
            learned=VersionLoader.learned,
            adapter=None,
        )

        def update(weights, spoil=lambda: None):
            for index, spec in enumerate(specs):
                layout.view(memory, index).copy_(weights[spec.name])
            slot.complete(1)
            details = {"layout": layout.to_plain(), "slot": slot.describe()}
            details["checksums"] = list(checksums(memory, layout))
            spoil()
            return VersionLoader.load_version(worker, "weights", details, True)

        def one_element():
            layout.view(memory, len(specs) // 2).view(-1)[-1] += 1e-6

        assert update(first) == ""
        loaded = observed(model)
        assert f"tensor {specs[len(specs) // 2].name!r} has checksum" in update(second, one_element)
        assert_same(observed(model), loaded)
        assert "wrote the next version over these" in update(second, lambda: slot.complete(2))
        assert update(second) == ""
        assert any(not torch.equal(found, loaded[name]) for name, found in observed(model).items())


class Counted(TorchDispatchMode):
    copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


class Small(Model):
    """The model of the reload's tests, with a loader of its own for `down`."""

    def __init__(self, loader, method=None):
        super().__init__()
        self.down.weight.weight_loader = loader
        self.down.quant_method = method or Coarse()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        record_metadata_for_reloading(self)
        self.down.quant_method.process_weights_after_loading(self.down)
        del self.attention.k_scale

    def sent(self, seed):
        torch.manual_seed(seed)
        return {name: torch.randn(8, 8) for name in ("embed.weight", "down.weight")}

    def reloaded(self, weights):
        with reloading(self, CONFIG):
            self.load_weights(weights.items())
        return observed(self)


def whole(param, weight):
    param.data.copy_(weight)


def transposed_halves(param, weight):
    for half in (0, 4):
        param[half : half + 4].data.copy_(weight.t()[half : half + 4])


def padded(param, weight):
    param.data[:6].copy_(weight[:6])
    param.data[6:].fill_(0.5)


@pytest.mark.parametrize("loader", [whole, transposed_halves, padded])
def test_a_module_that_makes_its_own_scale_is_updated_again_and_again(loader):
    model = Small(loader)
    sent = [model.sent(version) for version in (1, 2, 3)]
    expected = [model.reloaded(weights) for weights in sent]
    addresses = [model.down.weight.data_ptr(), model.down.weight_scale.data_ptr()]
    placement = learn(model, specs_of(sent[0]))
    for weights, right in zip(sent, expected, strict=True):
        placement.load(weights, CONFIG)
        assert_same(observed(model), right)
        assert model.head.weight is model.embed.weight
        assert [model.down.weight.data_ptr(), model.down.weight_scale.data_ptr()] == addresses


def scaled(param, weight):
    param.data.copy_(weight * 2)


def scaled_in_place(param, weight):
    param.data.copy_(weight)
    param.data.mul_(2)


def changed_in_place(param, weight):
    weight.add_(1)
    param.data.copy_(weight)


def depending_on_values(param, weight):
    param.data.copy_(weight if weight[0, 0].item() > 0 else weight.t())


def replaced(param, weight):
    param.data = weight


def other_dtype(param, weight):
    param.data.view(torch.int16).copy_(weight.view(torch.int16))


def partly(param, weight):
    param.data[:6].copy_(weight[:6])


@pytest.mark.parametrize(
    "loader", [scaled, scaled_in_place, changed_in_place, depending_on_values, replaced, other_dtype, partly]
)
def test_loaders_that_do_more_than_copy_are_left_to_vllm(loader):
    model = Small(loader)
    before = observed(model)
    assert learn(model, specs_of(model.sent(1))) is None
    assert_same(observed(model), before)


def test_tensors_that_do_not_suffice_are_left_to_vllm_which_names_what_is_missing():
    model = Small(whole)
    assert learn(model, specs_of({"embed.weight": torch.zeros(8, 8)})) is None


def test_a_load_that_fails_in_the_middle_leaves_no_traces_in_the_next():
    model = Small(whole)
    first, second = model.sent(1), model.sent(2)
    expected = [model.reloaded(weights) for weights in (first, second)]
    placement = learn(model, specs_of(first))
    placement.load(first, CONFIG)
    with pytest.raises(KeyError):
        placement.load({"embed.weight": second["embed.weight"]}, CONFIG)
    assert torch.equal(model.down.weight, expected[0]["down.weight"])
    placement.load(second, CONFIG)
    assert_same(observed(model), expected[1])
    assert_same(model.reloaded(first), expected[0])


class Keeping(Coarse):
    """Leaves the parameters as they are, and keeps a copy, a reference, or nothing."""

    def __init__(self, keeps):
        self.keeps, self.calls, self.kept = keeps, [], torch.zeros(8, 8)

    def process_weights_after_loading(self, layer):
        self.calls.append(layer)
        if self.keeps == "a copy":
            self.kept.copy_(layer.weight)
        elif self.keeps == "a reference":
            layer.kept = [layer.weight]


@pytest.mark.parametrize("keeps", ["a copy", "a reference", "nothing"])
def test_a_layer_whose_method_keeps_something_is_processed_at_every_update(keeps):
    model = Small(whole, method := Keeping(keeps))
    placement = learn(model, specs_of(model.sent(1)))
    method.calls.clear()
    for version in (1, 2, 3):
        placement.load(sent := model.sent(version), CONFIG)
        assert torch.equal(model.down.weight, sent["down.weight"])
        kept = {"a copy": method.kept, "a reference": getattr(model.down, "kept", [None])[0]}
        assert keeps == "nothing" or torch.equal(kept[keeps], sent["down.weight"])
    assert len(method.calls) == (1 if keeps == "nothing" else 3)


def doubled(layer):
    layer.weight.data.mul_(2)


def moved(layer):
    layer.weight.data = layer.weight.data.t().contiguous()


def strided(layer):
    layer.weight.data = layer.weight.data.t()


def renewed(layer):
    layer.weight = nn.Parameter(layer.weight * 3, requires_grad=False)


class Making(Coarse):
    def __init__(self, make):
        self.process_weights_after_loading = make


@pytest.mark.parametrize("make", [doubled, moved, strided, renewed])
def test_a_layer_is_written_in_place_only_if_its_method_leaves_it_there(make):
    model = Small(whole, Making(make))
    sent = [model.sent(version) for version in (1, 2, 3)]
    expected = [model.reloaded(weights) for weights in sent]
    placement = learn(model, specs_of(sent[0]))
    address = model.down.weight.data_ptr()
    for weights, right in zip(sent, expected, strict=True):
        placement.load(weights, CONFIG)
        assert_same(observed(model), right)
        assert model.down.weight.data_ptr() == address
    assert [placed.in_place for placed in placement.layers if placed.layer is model.down] == [make is doubled]
