"""README's task.yaml as a config."""

from asyncrl.config.schema import Config

README = {
    "run": {"name": "my-task"},
    "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", "chat_template": True},
    "data": {"train": "train.jsonl", "eval": "test.jsonl", "prompt_field": "question"},
    "reward": {"functions": [{"function": "task.py:reward"}]},
}


def config_of(**sections: dict) -> Config:
    """With other sections in place of its own."""
    return Config.model_validate(README | sections)
