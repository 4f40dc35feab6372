"""The adapter inside vLLM's worker processes: one, which every request names, and which an update replaces.

vLLM loads an adapter from a directory only, ignores tensors of layers that it cannot serve, and multiplies
the second matrix by alpha / rank in place. So its tensors are compared with those that the adapter must have,
and are copies that nothing else reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from asyncrl.errors import ConfigError

NUMBER = 1
# A path must be given, and is opened only for an adapter that is not loaded.
REQUEST = LoRARequest("policy", NUMBER, "memory")


class Adapter:
    """The adapter of one worker, with the content of PEFT's `settings` and tensors of these `shapes`."""

    def __init__(
        self, manager: Any, settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], start: str
    ) -> None:
        """Begin with the tensors of the file `start`, or with zeros. Raises ConfigError."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._settings = PEFTHelper.from_dict(dict(settings))
        self._dtype, self._served = manager.lora_config.lora_dtype, manager._adapter_manager
        mapper = getattr(self._served.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()
        offered = set[str]()
        for module in self._served.modules:
            offered.update(self._served.packed_modules.get(module, [module]))
        ignored = {parse_fine_tuned_lora_name(name, self._mapper)[0] for name in shapes} - offered
        if ignored:
            raise ConfigError(
                f"model.lora.targets: vLLM cannot serve an adapter of {min(ignored)} ({len(ignored)} such "
                "layers); leave it out of the targets, or set model.lora.sync: merged"
            )
        for wrapper in self._served.punica_wrapper_mapping.values():
            if isinstance(wrapper, PunicaWrapperCPU):
                wrapper.add_lora_linear = _add_product
        zeros = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        self.replace(load_file(start) if start else zeros)

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Put these tensors into use; vLLM keeps and changes them."""
        lora = LoRAModel.from_lora_tensors(
            NUMBER, tensors, self._settings, device="cpu", dtype=self._dtype, weights_mapper=self._mapper
        )
        self._served.remove_adapter(NUMBER)
        self._served.add_adapter(lora)
        self._served.activate_adapter(NUMBER)


def _add_product(
    y: Tensor,
    x: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scale: float,
    widths: Sequence[int],
    **_: Any,
) -> None:
    """Add the adapter's part to a layer's output `y`. vLLM's code for CPUs copies both matrices per token."""
    inputs, outputs, first = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), 0
    for down, up, width in zip(downs, ups, widths, strict=True):
        outputs[:, first : first + width].addmm_(inputs @ down[0, 0].T, up[0, 0].T, alpha=scale)
        first += width
