"""Adapters of a model by PEFT alone, and the orders of a learner that trains one."""

from dataclasses import replace
from types import SimpleNamespace

import peft
import torch

from tests.support.vllm_engines import load, slot_order

RANK, ALPHA = 8, 24
LORA = {"rank": RANK, "alpha": ALPHA}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(base, seed, targets=ALL):
    """The model with an adapter that is random in both matrices and moves it by some nats."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(load(base), settings).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(0.3)
    return model


def tensors_of(model):
    """The tensors of the adapter, as a learner publishes them."""
    return {name: tensor.detach().clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}


def publication(tensors):
    """What `slot_order` and `Sender` take for a model."""
    return SimpleNamespace(named_parameters=tensors.items)


def adapter_order(version, tensors, sender=None, **options):
    """(slot, order) of an adapter; `sender` serves it over TCP."""
    if sender is not None:
        return None, replace(sender.order(version, publication(tensors), **options), target="adapter")
    slot, update = slot_order(version, publication(tensors), **options)
    return slot, replace(update, target="adapter")
