"""The secrets of a run: derived from one, given by environment or file, and inherited by nobody who has no
use for them."""

import os
import stat

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.hosting import environment
from asyncrl.hosting.environment import child_environment
from asyncrl.hosting.processes import public_environment
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    JoinKeys,
    RunKeys,
    forget_secrets,
    is_given,
    join_keys,
    parse_keys,
    read_keys,
    run_keys,
)

KEYS = RunKeys(bytes(range(32)))


def test_what_is_written_is_read_again_and_a_join_key_makes_no_learner():
    assert parse_keys(KEYS.secret.hex()) == KEYS
    assert parse_keys(f"{KEYS.join.text()}\n") == KEYS.join
    given = {SECRET_VARIABLE: KEYS.join.text()}
    assert join_keys(given) == KEYS.join
    with pytest.raises(RunError, match="the learner needs the run"):
        run_keys(given)


def test_a_secret_is_taken_out_of_the_environment():
    environment = {SECRET_VARIABLE: KEYS.secret.hex(), SECRET_FILE_VARIABLE: "", "OTHER": "stays"}
    assert run_keys(environment) == KEYS and join_keys(environment) == KEYS.join and is_given(environment)
    forget_secrets(environment)
    assert environment == {"OTHER": "stays"} and not is_given(environment)
    with pytest.raises(RunError, match="is not known"):
        run_keys(environment)


def test_a_secret_may_come_in_a_file_that_is_the_owners_alone(tmp_path):
    file = tmp_path / "join.key"
    file.write_text(KEYS.join.text())
    file.chmod(0o640)
    given = {SECRET_FILE_VARIABLE: str(file)}
    with pytest.raises(RunError, match="chmod 600"):
        read_keys(given)
    file.chmod(0o600)
    assert isinstance(read_keys(given), JoinKeys)


def test_what_another_user_lends_our_group_is_read_and_what_all_can_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "run.key"
    file.write_text(KEYS.secret.hex())
    given = {SECRET_FILE_VARIABLE: str(file)}
    owner = file.stat().st_uid
    for mode, reader, is_read in (
        (0o440, owner + 1, True),
        (0o440, owner, False),
        (0o444, owner + 1, False),
    ):
        file.chmod(mode)
        monkeypatch.setattr(os, "geteuid", lambda reader=reader: reader)
        if is_read:
            assert read_keys(given) == KEYS
        else:
            with pytest.raises(RunError, match="others can read"):
                read_keys(given)


@pytest.mark.parametrize("text", ["", "zz", "ab" * 31, "ab" * 65])
def test_what_is_no_secret_is_refused_and_not_repeated(text):
    with pytest.raises(RunError, match=SECRET_FILE_VARIABLE) as caught:
        parse_keys(text)
    assert not text or text not in str(caught.value)


def test_the_run_directory_keeps_its_secret_to_its_owner(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(fresh=False)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.draw_secret()
    made = directory.keys()
    directory.draw_secret()
    assert directory.keys() == made, "drawn once"
    assert parse_keys(directory.write_join_key(made.join).read_text()) == made.join
    for name in ("run.key", "join.key"):
        assert stat.S_IMODE((directory.path / name).stat().st_mode) == 0o600
    (directory.path / "run.key").chmod(0o644)
    with pytest.raises(RunError, match="that others can read"):
        directory.keys()


def config(**parts):
    base = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"train": "t"}}
    return Config.model_validate(base | {"reward": {"functions": [{"function": "exact_match"}]}} | parts)


SECRETS = (
    "ASYNCRL_SECRET",
    "ASYNCRL_STORE_PASSWORD",
    "AWS_SECRET_ACCESS_KEY",
    "GITHUB_TOKEN",
    "JUDGE_KEY",
    "WANDB_API_KEY",
)


def test_roles_inherit_what_they_need_and_no_other_secret(monkeypatch, tmp_path):
    for name in (*SECRETS, "HF_TOKEN", "CUDA_HOME", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "canary")

    def given(chosen, **changes):
        return {
            name
            for name, value in child_environment(chosen, tmp_path, threads=1, gpus=[], **changes).items()
            if value == "canary"
        }

    usual = {"HF_TOKEN", "CUDA_HOME", "NCCL_DEBUG"}
    assert given(config()) == usual
    assert given(config(), also=environment.LEARNER) == usual | {"WANDB_API_KEY"}
    assert given(config(store={"url": "rediss://host"})) == usual | {"ASYNCRL_STORE_PASSWORD"}
    assert given(config(run={"name": "a", "environment": ["JUDGE_*"]})) == usual | {"JUDGE_KEY"}
    assert not {*SECRETS, "HF_TOKEN"} & public_environment().keys()
    assert {"PATH", "CUDA_HOME", "NCCL_DEBUG"} <= public_environment().keys()
