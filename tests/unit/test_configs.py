"""Every shipped config loads, every preset combines with a run, and the reasons in their comments hold."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.dataset import load_rows
from asyncrl.hosting.machine import Machine
from asyncrl.hosting.memory_use import ModelShape
from asyncrl.hosting.placement import misplaced, placement_of
from asyncrl.preflight.forecast import forecast
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.forms import bind, load_function
from asyncrl.trainer.kept import counted
from asyncrl.trainer.meter import peak_flops_per_s, step_flops

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PRESETS = sorted((ROOT / "configs" / "algorithms").glob("*.yaml"))
SHARED = {
    "stories15m-words-cpu": [
        "model.path=../shared/models/stories15M-hd96",
        "data.train=../shared/data/story_words/train.jsonl",
        "data.eval=../shared/data/story_words/test.jsonl",
    ],
    "gsm8k-smollm2-135m-cpu": [
        "data.train=../shared/data/gsm8k/train.jsonl",
        "data.eval=../shared/data/gsm8k/test.jsonl",
    ],
}
"""What a reader makes or fetches, where it lies next to this repository."""
ON_GPUS = sorted((ROOT / "configs").glob("*gpu.yaml"))
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": ModelShape(
        parameters=494_032_768, layers=24, hidden=896, intermediate=4864, query=896, kv=128, vocabulary=151_936,
        tables=151_936 * 896,
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": ModelShape(
        parameters=1_543_714_304, layers=28, hidden=1536, intermediate=8960, query=1536, kv=256, vocabulary=151_936,
        tables=151_936 * 1536,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ModelShape(
        parameters=8_030_261_248, layers=32, hidden=4096, intermediate=14336, query=4096, kv=1024, vocabulary=128_256,
        tables=2 * 128_256 * 4096,
    ),
}  # fmt: skip
MINIMAL = (
    "run: {name: x}\nmodel: {path: some/model}\ndata: {train: some.jsonl}\nreward: {functions: [{function: "
    "gsm8k}]}\n"
)


def shape_of(config: Config) -> ModelShape:
    """The shape of the config's model, with the activations of its architecture counted."""
    shape = SHAPES[config.model.path]
    kind, head = ("llama" if "Llama" in config.model.path else "qwen2"), (64 if shape.hidden == 896 else 128)
    architecture = AutoConfig.for_model(
        kind,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query // head,
        num_key_value_heads=shape.kv // head,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=kind == "qwen2",
    )
    assert ModelShape.of(architecture, shape.parameters) == shape
    return counted(shape, architecture, config.model, config.learner.gradient_checkpointing)


def gpus_of(path: Path) -> int:
    return int(re.search(r"(\d+)gpu$", path.stem)[1])


def test_there_are_configs():
    critics_and_returns = {
        "ppo",
        "decoupled_ppo",
        "dual_clip",
        "reinforce",
        "reinforce_plus_plus",
        "remax",
        "spo",
    }
    groups = {"grpo", "dr_grpo", "dapo", "rloo", "opo", "gpg", "grpo_passk", "lite_ppo"}
    losses = {"gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov"}
    assert {path.stem for path in PRESETS} >= critics_and_returns | groups | losses
    assert "quickstart" in {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_rewards_its_rows(path):
    config = load_config(path, SHARED.get(path.stem, ()))
    assert config.run.name in (path.stem, path.stem.removesuffix("-cpu"))
    rewards = [bind(load_function(function.function)) for function in config.reward.functions]
    for source in [one.path for one in config.data.tasks.values()]:
        if source and (ROOT / source).is_file():
            row = load_rows(str(ROOT / source))[0]
            columns = {name: value for name, value in row.items() if name not in ("prompt", "response")}
            assert all(0 <= reward([""], ["17 words"], [columns])[0][0] <= 1 for reward in rewards)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_combines_with_a_run(path, tmp_path):
    (tmp_path / "run.yaml").write_text(f"extends: {path}\n{MINIMAL}")
    config = load_config(tmp_path / "run.yaml")
    plain = load_config(_write(tmp_path / "plain.yaml", MINIMAL))
    # It speaks of the algorithm, its critic and the optimizer steps per batch; all else is the run's.
    batch = plain.batch.model_copy(
        update={"minibatches": config.batch.minibatches, "epochs": config.batch.epochs}
    )
    assert config.model_copy(
        update={"algorithm": plain.algorithm, "critic": plain.critic}
    ) == plain.model_copy(update={"batch": batch})
    assert config.algorithm != plain.algorithm or config.batch != plain.batch
    # Both norms and buffers are about the response limit; they must fit the default one.
    for choice in (config.algorithm.aggregation, *config.algorithm.shaping):
        assert choice.params.get("scale", 512) == config.sampling.max_response_tokens
        assert choice.params.get("buffer_tokens", 0) < config.sampling.max_response_tokens


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_says_where_it_comes_from_and_what_it_is_made_of(path):
    comment, _, body = path.read_text().partition("\nalgorithm:")
    assert re.match(r"# .*(arXiv:\d{4}\.\d{5}|Williams 1992)", comment), "the paper stands in the first line"
    for choice in ("advantage", "policy_loss", "aggregation"):
        assert f"\n  {choice}: {{name: " in body, f"{choice} is left to the defaults"
    assert len(path.read_text().splitlines()) <= 20


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_ratio_that_is_to_be_clipped_can_leave_one(path, tmp_path):
    """With one optimizer step per batch and a recomputed proximal policy, each ratio is 1: losses agree."""
    config = load_config(_write(tmp_path / "run.yaml", f"extends: {path}\n{MINIMAL}"))
    steps = config.batch.minibatches * config.batch.epochs
    if path.stem in ONE_STEP:
        assert (config.algorithm.proximal, steps) == ("recompute", 1)
    else:
        assert config.algorithm.proximal == "behaviour" or steps > 1


ONE_STEP = {"reinforce", "rloo", "remax", "opo", "gpg", "grpo", "dr_grpo", "grpo_passk", "lite_ppo"}
ONE_STEP |= {"dpo", "ipo", "kto", "best_of_n", "distill", "opsd"}
"""Without a ratio, or about the advantage: there PPO's loss is the policy gradient with weights."""


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.stem.startswith("stories")], ids=lambda path: path.stem
)
def test_configs_of_present_models_fit_their_files(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path, SHARED[path.stem])
    if not Path(config.model.path).exists():
        pytest.skip(f"needs {config.model.path}")
    validated_config(path, SHARED[path.stem])


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_every_gpu_config_fits_the_gpus_that_its_header_names(path):
    config, header = load_config(path), path.read_text().partition("\n\n")[0]
    size_bytes, gpus = int(re.search(r"(\d+) GB", header)[1]) * 10**9, gpus_of(path)
    machine = Machine(memory_bytes=500 << 30, gpu_bytes=(size_bytes,) * gpus)
    plan = forecast(config, shape_of(config), machine, rows=[7473])
    assert not plan.warnings and not list(misplaced(config, gpus))
    placement = placement_of(config, gpus)
    assert {gpu for seat in (*placement.ranks, *placement.generators) for gpu in seat.gpus} == {*range(gpus)}


def test_the_config_of_the_page_on_own_tasks_fits_the_gpu_that_it_names(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "own-task.md").read_text()
    (block,) = re.findall(r"```yaml\n(# gpu-task\.yaml\n.*?)```", page, re.DOTALL)
    monkeypatch.chdir(ROOT)
    config = load_config(_write(tmp_path / "gpu-task.yaml", block))
    assert "fits one GPU of 80 GB" in page
    machine = Machine(memory_bytes=500 << 30, gpu_bytes=(80 * 10**9,))
    assert not forecast(config, shape_of(config), machine, rows=[7473]).warnings


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_expected_times_follow_from_their_assumptions_and_the_config(path):
    """docs/gpu.md against the formula that it states, and the header of the config against docs/gpu.md."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    cells = re.search(rf"^\| `{re.escape(path.name)}` \|(.*)\|$", page, re.MULTILINE)[1].split("|")
    learn, sample, *numbers = (cell.strip() for cell in cells)
    prompt, response, learner_rate, generator_rate, learning_s, sampling_s, step_s, mfu = map(float, numbers)
    config, placement = load_config(path), placement_of(load_config(path), gpus_of(path))
    is_shared = bool(placement.beside_learner())
    assert (int(learn), sample) == (
        len(placement.ranks), "shared" if is_shared else str(len(placement.generators))
    )  # fmt: skip
    answers = config.batch.sequences
    expected_s = (
        answers * (prompt + response) / (learner_rate * len(placement.ranks)),
        answers * response / (generator_rate * len(placement.generators)),
    )
    assert (learning_s, sampling_s) == pytest.approx(expected_s, abs=0.06)
    together_s = sum(expected_s) if is_shared else max(expected_s)
    assert step_s == pytest.approx(together_s + 0.3, abs=0.06)
    flops = step_flops(SHAPES[config.model.path], [int(prompt + response)], int(response))
    peak = peak_flops_per_s("NVIDIA H100 80GB HBM3")
    assert mfu == pytest.approx(learner_rate / (prompt + response) * flops / peak, abs=0.006)
    assert f"Computed, not measured (docs/gpu.md): {numbers[-2]} s a step" in path.read_text()


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
