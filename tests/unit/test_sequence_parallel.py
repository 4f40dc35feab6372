"""Tokens against heads: ranks, a thread each, give what one attention over all tokens gives.

Real processes and gradients are in tests/integration/test_sequence_parallel.py.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import LlamaConfig

from asyncrl.config.schema import Config
from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import segment_attention
from asyncrl.trainer.loading import load_model
from asyncrl.trainer.policy import PolicyModule
from asyncrl.trainer.sequence_parallel import across_ranks, require_divisible
from tests.support.models import tiny_qwen2
from tests.support.sequence_ranks import OneRank, Threads

CPU, LAYER = torch.device("cpu"), torch.nn.Identity()
STARTS = (0, 5, 6, 17, 30)


@pytest.mark.parametrize(
    ("count", "heads", "kv_heads"), [(2, 4, 4), (2, 4, 1), (4, 4, 2), (3, 6, 2), (2, 6, 3), (7, 14, 2)]
)
def test_ranks_that_exchange_heads_give_the_attention_over_all_tokens(
    count: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(0)
    shapes = [(1, some, STARTS[-1], size) for some, size in ((heads, 8), (kv_heads, 8), (kv_heads, 4))]
    columns = [torch.randn(shape) for shape in shapes]
    expected, _ = segment_attention(LAYER, *columns, None, sequence_starts=STARTS, scaling=0.3)
    threads, none = Threads(count), torch.zeros(0, dtype=torch.int64)

    def attend(index: int) -> Tensor:
        rank = OneRank(index, count, threads)
        ids = torch.arange(STARTS[-1])
        part = rank.part(ids, ids, STARTS, none)
        mine = part.input_ids_n[:, None]
        own = [column.transpose(1, 2)[0][mine[:, 0]].transpose(0, 1)[None] for column in columns]
        output, _ = across_ranks(segment_attention)(
            LAYER, *own, None, sequence_ranks=rank, sequence_starts=part.sequence_starts, scaling=0.3
        )
        return output

    with ThreadPoolExecutor(count) as pool:
        found = torch.cat(list(pool.map(attend, range(count))), dim=1)
    torch.testing.assert_close(found[:, : STARTS[-1]], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_token_is_computed_once_and_padding_is_a_sequence_of_its_own(count: int) -> None:
    ids, positions = torch.arange(100, 130), torch.cat([torch.arange(n) for n in (5, 1, 11, 13)])
    source = torch.tensor([0, 3, 8, 9, 20, 28])
    parts = [OneRank(index, count).part(ids, positions, STARTS, source) for index in range(count)]
    assert torch.cat([part.input_ids_n for part in parts])[:30].equal(ids)
    assert torch.cat([part.position_ids_n for part in parts])[:30].equal(positions)
    assert torch.cat([part.own_t for part in parts]).equal(torch.arange(len(source)))
    assert torch.cat([part.input_ids_n[part.source_t] for part in parts]).equal(ids[source])
    padded = sum(len(part.input_ids_n) for part in parts)
    assert {len(part.input_ids_n) for part in parts} == {padded // count} and padded - 30 < count
    assert {part.sequence_starts for part in parts} == {STARTS if padded == 30 else (*STARTS, padded)}


def test_a_layer_that_mixes_tokens_without_attention_is_refused(
    tmp_path: Path,
) -> None:
    model = load_model(ModelConfig(path=str(tiny_qwen2(tmp_path)), dtype="float32"), CPU, sequence_parallel=2)
    policy, ids = PolicyModule(model, OneRank(0, 2)), torch.arange(7)
    packed = {"input_ids_N": ids, "position_ids_N": ids, "sequence_starts": (0, 7), "source_T": ids[:-1]}
    arguments = {**packed, "target_T": ids[1:], "temperature": 1.0, "chunk": 8}
    policy(**arguments)
    with pytest.raises(ConfigError, match="ranks cannot divide pixel_values of this model; set it to 1"):
        policy(**arguments, pixel_values=ids)
    model.base_model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ConfigError, match=r"only 1 of 2 layers of this model \(qwen2\)"):
        policy(**arguments)


def test_models_that_ranks_cannot_divide_are_refused() -> None:
    config = LlamaConfig(num_attention_heads=6, hidden_size=48)
    require_divisible(config, 3)
    with pytest.raises(ConfigError, match="found 4; allowed is a divisor of the 6 attention heads"):
        require_divisible(config, 4)
    config = LlamaConfig(
        num_attention_heads=6, hidden_size=48, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    )
    require_divisible(config, 1)
    with pytest.raises(ConfigError, match="rope_type dynamic depends on the length"):
        require_divisible(config, 2)


def test_ranks_are_divided_into_equal_shares_of_a_batch() -> None:
    assert LearnerConfig(ranks=6).shares == 6 and LearnerConfig(ranks=6, sequence_parallel=3).shares == 2
    parts = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"train": "t"}}
    parts |= {
        "reward": {"functions": [{"function": "math"}]},
        "learner": {"ranks": 6, "sequence_parallel": 4},
    }
    with pytest.raises(ValidationError, match=r"found 4, .* learner.ranks \(6\); set one of \[1, 2, 3, 6\]"):
        Config.model_validate(parts)
