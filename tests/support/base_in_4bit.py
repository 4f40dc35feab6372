"""An adapter on a base in 4 bits by transformers, PEFT and bitsandbytes alone, in a process that has these."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.libraries import ROOT
from tests.support.trainer_worker import plain_loss

SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def of_peft(base: Path, adapter: Path, ids: list[int], out: Path) -> dict[str, Tensor]:
    """The gradient of `plain_loss` by PEFT's names, and as `logprobs` those of ids[1:]."""
    command = [sys.executable, "-m", __name__, str(base), str(adapter), json.dumps(ids), str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    return load_file(out)


def main(base: str, adapter: str, sequence: str, out: str) -> None:
    settings = BitsAndBytesConfig(**SETTINGS, bnb_4bit_compute_dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=settings)
    # In eval mode bitsandbytes rounds to bfloat16 on a CPU with AVX-512 BF16; `lora.inject` keeps it from that.
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    plain_loss(model).backward()
    found = {
        name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    ids = torch.tensor([json.loads(sequence)])
    with torch.no_grad():
        table = model(ids).logits[0, :-1].log_softmax(-1)
    save_file(found | {"logprobs": table.gather(-1, ids[0, 1:, None])[:, 0].contiguous()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
