"""On PYTHONPATH, Triton's kernels run in Triton's interpreter, so that vLLM takes its GPUs' model runner on a CPU.

vLLM takes this runner where Triton has an active driver. Its platform of CPUs does not schedule ahead of the
step that runs, as it does on GPUs, unless it is told to.
"""

import importlib.abc
import importlib.util
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


class Driver:
    """In place of a GPU's; the interpreter asks it nothing else."""

    @staticmethod
    def is_active():
        return True


def add_driver(module):
    module.backends["cpu"] = module.Backend(compiler=None, driver=Driver)


def schedule_ahead(module):
    update = module.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def truncate_without_triton(module):
    """The interpreter lacks what this one kernel needs: numbers of a range as tensors."""
    module.apply_top_k_top_p_triton = module.apply_top_k_top_p_pytorch


CHANGES = {
    "triton.backends": add_driver,
    "vllm.platforms.cpu": schedule_ahead,
    "vllm.v1.sample.ops.topk_topp_sampler": truncate_without_triton,
}


class Changer(importlib.abc.MetaPathFinder):
    """Changes a module when it has been loaded."""

    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, Changer())
