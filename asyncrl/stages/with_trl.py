"""Trains a stage with TRL. Ours are the model's place, the trackers, checkpoints that verify, the export."""

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError

from asyncrl.config.named_files import is_local
from asyncrl.data.prompts import stop_ids
from asyncrl.errors import ConfigError, DataError, MemoryFullError, RunError, from_extra, lacks_gpu_memory
from asyncrl.files import with_cure
from asyncrl.hosting.progress import Pace, begin, while_growing
from asyncrl.lora import adapter_plan
from asyncrl.run.checkpoint import CheckpointStore
from asyncrl.run.directory import RunDirectory, write_directory
from asyncrl.run.starts import record_start, versions
from asyncrl.stages.follow import EVALUATION, Follow
from asyncrl.stages.record import digest_of, read_stage, write_stage
from asyncrl.stages.rows import for_trl, read_rows
from asyncrl.stages.settings import StageConfig
from asyncrl.stages.trl_settings import TRAINERS
from asyncrl.telemetry.text import visible, visible_lines
from asyncrl.trainer.loading import require_writable

# Checkpoints that are kept by default; TRL's own is all.
KEEP = 2
# Ends of the names that TRL adds to the measures of held-out rows.
NOT_OF_THE_MODEL = ("runtime", "per_second", "preparation_time", "epoch", "num_tokens")


def train(config: StageConfig, directory: RunDirectory, *, leads: bool = True) -> None:
    """Train from the newest checkpoint or from the beginning, and write the model; rank 0 `leads`.

    Raises ConfigError for settings that TRL refuses, RunError for a disk that cannot be written.
    """
    begin("load the model", Pace.SLOW)
    stop = threading.Event()
    store = checkpoints_of(directory, config.trl.get("save_total_limit", KEEP))
    follow = Follow(config, directory, store, stop, leads=leads)
    with follow, _as_our_errors(config, directory):
        trainer = trainer_of(config, directory, follow)
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
        # Rank 0 removes what an interrupted save left.
        with trainer.accelerator.main_process_first():
            resume = store.choose()
        if leads:
            step = int(resume.name.rpartition("-")[2]) if resume else 0
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            record_start(directory.starts, step, gpu)
        before = read_stage(directory).get("before")
        if before is None:
            before = _evaluated(trainer)
            if leads:
                write_stage(directory, before=before)
        # The rows and the noise of a stage that was interrupted before its first checkpoint are the same.
        transformers.set_seed(config.run.seed)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        if stop.is_set():
            raise SystemExit(128 + signal.SIGTERM)
        after = _evaluated(trainer)
        if leads:
            _finish(trainer, config, directory, after)
        else:
            begin("end", Pace.OVER)


def checkpoints_of(directory: RunDirectory, limit: Any = KEEP) -> CheckpointStore:
    """Return the checkpoints that TRL writes, of which `trl.save_total_limit` stay; 0 and None: all."""
    keep = limit if limit and limit > 0 else sys.maxsize
    key = directory.checkpoint_key()
    return CheckpointStore(directory.trl_checkpoints, key, keep=keep, form="checkpoint-{}")


def trainer_of(config: StageConfig, directory: RunDirectory, follow: Follow) -> Any:
    """Return TRL's trainer of the stage, with the model loaded and the rows tokenised."""
    with from_extra("stages"):
        import datasets
        import trl

    name, teacher = TRAINERS[config.stage][1], config.teacher
    settings = config.trl | _ours(config, directory)
    try:
        arguments = getattr(trl, f"{name}Config")(**settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"trl: TRL refuses these settings: {error}; correct them") from error
    # Without it each tool and each call has the arguments of all rows, as null.
    of_rows = partial(datasets.Dataset.from_list, on_mixed_types="use_json")
    train, held_out = read_rows(config)
    trainer = getattr(trl, f"{name}Trainer")(
        **_model(config, arguments),
        args=arguments,
        train_dataset=of_rows(for_trl(train, config.stage)),
        eval_dataset=of_rows(for_trl(held_out, config.stage)) if held_out else None,
        callbacks=[follow],
        **({"teacher_model": teacher.path} if teacher else {}),
    )
    # A chat template may write a line's end behind the stop token, and the score would be trained there.
    if config.stage == "rm":
        tokenizer = trainer.processing_class
        cut = partial(_up_to_stop, {*stop_ids(config.model), tokenizer.eos_token_id}, tokenizer)
        trainer.train_dataset = trainer.train_dataset.map(cut)
        trainer.eval_dataset = trainer.eval_dataset and trainer.eval_dataset.map(cut)
    require_writable(getattr(trainer.model, "generation_config", None))
    # Whatever made it due: a step, the end of an epoch, a better measure.
    watched = while_growing("checkpoint", directory.trl_checkpoints)
    trainer._save_checkpoint = watched(trainer._save_checkpoint)
    # transformers would go on with an epoch whose last step of training is in the checkpoint.
    run_epoch = trainer._run_epoch
    trainer._run_epoch = lambda **given: (
        run_epoch(**given) if trainer.state.global_step < trainer.state.max_steps else None
    )
    return trainer


def _up_to_stop(stops: set[int], tokenizer: Any, row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the sequences up to the stop token behind their text, where an answer of the policy ends."""
    cut = {}
    for name in ("chosen_ids", "rejected_ids"):
        ids, end = row[name], len(row[name])
        while end and (ids[end - 1] in stops or not tokenizer.decode([ids[end - 1]]).strip()):
            end -= 1
        stop = next((at for at in range(end, len(ids)) if ids[at] in stops), len(ids))
        cut[name] = ids[: stop + 1]
    return cut


def _ours(config: StageConfig, directory: RunDirectory) -> dict[str, Any]:
    model, teacher = config.model, config.teacher
    # As in a run, trained weights are float32 in every precision.
    dtype = model.dtype if model.lora else "float32"
    return {
        "output_dir": str(directory.trl_checkpoints),
        "run_name": config.run.name,
        "report_to": "none",
        "disable_tqdm": True,
        # TRL would remove the older one before the new one is signed; `Follow.on_save` does it after that.
        "save_total_limit": None,
        "seed": config.run.seed,
        "bf16": model.dtype == "bfloat16",
        "trust_remote_code": model.trust_remote_code,
        "model_init_kwargs": {"dtype": dtype} | ({"revision": model.revision} if model.revision else {}),
    } | ({"teacher_model_revision": teacher.revision} if teacher else {})


def _model(config: StageConfig, arguments: Any) -> dict[str, Any]:
    """Return the model's name, which TRL loads, and the adapter that it adds; or a model that has one."""
    model, lora = config.model, config.model.lora
    if lora is None:
        return {"model": model.path}
    if lora.start is None:
        adapter = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            target_modules=adapter_plan(model, lora)[0]["target_modules"],
            task_type="SEQ_CLS" if config.stage == "rm" else "CAUSAL_LM",
            modules_to_save=["score"] if config.stage == "rm" else None,
            revision=model.revision,
        )
        return {"model": model.path, "peft_config": adapter}
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model.path, trust_remote_code=model.trust_remote_code, **arguments.model_init_kwargs
    )
    arguments.model_init_kwargs = None
    # TRL would take that of the main branch.
    sides = dict.fromkeys(("padding_side", "truncation_side"), "left") if config.stage == "distil" else {}
    tokenizer = transformers.AutoProcessor.from_pretrained(model.path, **model.hub_options, **sides)
    adapted = PeftModel.from_pretrained(base, lora.start, is_trainable=True)
    return {"model": adapted, "processing_class": tokenizer}


def _evaluated(trainer: Any) -> dict[str, float]:
    """Return the measures of held-out rows; empty without such rows."""
    if trainer.eval_dataset is None:
        return {}
    begin(EVALUATION, Pace.SLOW)
    found = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    return {name: float(value) for name, value in found.items() if not name.endswith(NOT_OF_THE_MODEL)}


def _finish(trainer: Any, config: StageConfig, directory: RunDirectory, after: dict[str, float]) -> None:
    """Write the model, without the pickle that TRL's own save adds, then that the stage is finished."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings = {name: value for name, value in trainer.args.to_dict().items() if name != "output_dir"}
    record = {"after": after, "trl": settings, "versions": versions(), "steps": trainer.state.global_step}
    with write_directory(directory.model) as writing, while_growing("export", writing):
        if isinstance(model, PeftModel):
            model.save_pretrained(str(writing), selected_adapters=["default"])
        else:
            # Not its buffers: by these, in float32, routers choose experts.
            for each in model.parameters():
                each.data = each.data.to(getattr(torch, config.model.dtype))
            model.save_pretrained(writing)
        trainer.processing_class.save_pretrained(writing)
        library = "peft" if config.model.lora else "transformers"
        card = stage_card(config, read_stage(directory) | record, library)
        (writing / "README.md").write_text(card, encoding="utf-8")
        record["digest"] = digest_of(writing)
    write_stage(directory, **record, finished=True)


@contextmanager
def _as_our_errors(config: StageConfig, directory: RunDirectory) -> Iterator[None]:
    """Turn what a restart would meet again into an error that says what to do."""
    try:
        yield
    except (ConfigError, DataError, RunError):
        raise
    except OSError as error:
        # transformers raises one without a number if the hub lacks a name or cannot be reached.
        if error.errno is None:
            teacher = f" or teacher.path ({config.teacher.path})" if config.teacher else ""
            found = f"cannot load model.path ({config.model.path}){teacher}: {error}"
            cure = "correct it; for a hub name check the network, HF_TOKEN and HF_HUB_OFFLINE"
            raise ConfigError(f"stage {config.stage}: {found}; {cure}") from error
        raise RunError(f"stage {config.stage}: {with_cure(error, directory.path)}") from error
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and lacks_gpu_memory(error):
            size = "trl.per_device_train_batch_size or trl.max_length"
            raise MemoryFullError(f"the GPU's memory is full ({error}); lower {size}") from error
        # torch's writer of archives and safetensors do not name the file.
        if isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error):
            place = directory.trl_checkpoints
            raise RunError(f"{place} cannot be written: {error}; free some space there") from error
        raise
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(f"stage {config.stage}: TRL refuses this: {error}") from error


def stage_card(config: StageConfig, record: Mapping[str, Any], library: str) -> str:
    """Return origin, rows, settings and results of the model, without paths of this machine in the head."""
    model, data = config.model.path, config.data.train.partition(":")[0]
    task = "text-classification" if config.stage == "rm" else "text-generation"
    tags = ["asyncrl", "trl", config.stage, *(["lora"] if library == "peft" else [])]
    head = {"library_name": library, "pipeline_tag": task, "tags": tags}
    head |= {} if is_local(model) else {"base_model": model}
    head |= {"base_model_relation": "adapter"} if library == "peft" and "base_model" in head else {}
    head |= {} if is_local(data) else {"datasets": [data]}
    made = {"rows": record["fixed"]["data.train"], "trl": config.trl, "versions": record["versions"]}
    before, after = record["before"], record["after"]
    measured = [f"| {visible(name)} | {before.get(name, '')} | {after[name]} |" for name in after]
    trainer = f"TRL's {TRAINERS[config.stage][1]}Trainer"
    return "\n".join(
        [
            "---", _yaml(head), "---", "", f"# {visible(config.run.name)}", "",
            f"{visible(model)} after {record['steps']} steps of {trainer}.", "",
            "| held out | before | after |", "|---|---|---|", *measured, "",
            "```yaml", visible_lines(_yaml(made)).replace("```", "'''"), "```", "",
        ]
    )  # fmt: skip


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False).strip()
