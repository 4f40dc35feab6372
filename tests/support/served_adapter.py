"""vLLM alone with an adapter that it reads from a directory, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.libraries import ROOT


def logprobs_of_vllm(base: Path, adapter: Path, ids: list[int], out: Path, *, rank: int) -> list[float]:
    """Those of ids[1:], in float32; the process writes them to the new file `out`."""
    command = [sys.executable, "-m", __name__, str(base), str(adapter), json.dumps(ids), str(rank), str(out)]
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[float] = json.loads(out.read_text())
    return found


def main(base: str, adapter: str, sequence: str, rank: str, out: str) -> None:
    from asyncrl.config.sections import GeneratorConfig
    from asyncrl.engine.vllm.args import set_environment

    set_environment(GeneratorConfig(threads=1), device="cpu")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=base,
        dtype="float32",
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=int(rank),
        max_model_len=64,
        kv_cache_memory_bytes=1 << 28,
    )
    ids = json.loads(sequence)
    (output,) = llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        lora_request=LoRARequest("policy", 1, adapter),
    )
    assert output.prompt_logprobs is not None
    found = [
        one[token].logprob for one, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if one
    ]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
