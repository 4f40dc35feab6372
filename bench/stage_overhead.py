"""CPU time of a stage against bare TRL with its rows and settings: `python bench/stage_overhead.py`.

Each is a new process, in turns; the medians' ratio is printed. Waiting for other processes costs no CPU time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.stages import begun, tiny_stage

BARE = """
import sys, asyncrl, trl, datasets, yaml
config = yaml.safe_load(open(sys.argv[1]))
rows = [datasets.Dataset.from_json(config["data"][key]).remove_columns("note") for key in ("train", "eval")]
arguments = trl.SFTConfig(
    output_dir=sys.argv[2], report_to="none", disable_tqdm=True, bf16=False, save_total_limit=2,
    model_init_kwargs={"dtype": "float32"}, **config["trl"],
)
trainer = trl.SFTTrainer(config["model"]["path"], arguments, train_dataset=rows[0], eval_dataset=rows[1])
trainer.evaluate()
trainer.train()
trainer.evaluate()
trainer.save_model()
"""


def cpu_s(command: list[str]) -> float:
    """Run a command on one thread and return the CPU time of its processes."""
    before = os.times()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def stage_s(path: Path) -> float:
    """Begin a stage as `asyncrl stage` does, and measure the process that trains it."""
    _, directory = begun(path)
    return cpu_s([sys.executable, "-P", "-m", "asyncrl.stages.process", "--config", str(directory.config)])


def main() -> None:
    """Measure both `--times` times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    bare, stage = [], []
    with tempfile.TemporaryDirectory() as place:
        for time in range(given.times):
            settings = {"max_steps": given.steps, "logging_steps": 10}
            path = tiny_stage(Path(place), "sft", name=f"stage{time}", trl=settings)
            bare.append(cpu_s([sys.executable, "-c", BARE, str(path), f"{place}/bare{time}"]))
            stage.append(stage_s(path))
    ratio = statistics.median(stage) / statistics.median(bare)
    print(f"stage {stage} s, bare TRL {bare} s of CPU time; ratio of the medians {ratio:.3f}")


if __name__ == "__main__":
    main()
