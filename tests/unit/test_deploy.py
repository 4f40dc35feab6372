"""Dockerfile, Compose file and their README agree: each path, command, key, version and GPU exists."""

import os
import re
import shutil
import subprocess
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asyncrl import __version__
from asyncrl.buffer.users import GENERATOR, LEARNER
from asyncrl.cli.app import app
from asyncrl.commands.down import MARGIN
from asyncrl.commands.supervising import LEAVE_S
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.store import StoreConfig
from asyncrl.hosting import gpus
from asyncrl.hosting.environment import child_environment
from asyncrl.hosting.placement import choose_transport, misplaced, placement_of
from asyncrl.launch.specs import learner_spec
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import SECRET_FILE_VARIABLE
from tests.support.compose import DEPLOY, compose, env_file, mounts, used_variables, words
from tests.support.pages import commands

ROOT = DEPLOY.parent
SECRETS = {
    "ASYNCRL_STORE_PASSWORD": "p" * 64,
    "ASYNCRL_GENERATOR_PASSWORD": "q" * 64,
    "GRAFANA_PASSWORD": "g" * 32,
}
VALUES = env_file() | SECRETS
COMPOSE = compose(VALUES)
SERVICES = COMPOSE["services"]
PROJECT_DIRECTORY = (DEPLOY / VALUES["ASYNCRL_PROJECT"]).resolve()
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("asyncrl:")}
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def gib(text: str) -> int:
    """Docker's 8g, Valkey's 6gb."""
    return int(re.fullmatch(r"(\d+)gb?", text)[1])


def config_of(command: list[str]) -> Config:
    """What the command of a learner or `up` would run."""
    _, *rest = [word for word in command if word != "--plain" and not word.startswith("--join-key=")]
    assert rest[0] == "--config"
    return load_config(PROJECT_DIRECTORY / rest[1], rest[2:])


def run_directory(path: Path) -> RunDirectory:
    """As the first start of a run leaves it."""
    directory = RunDirectory(path)
    directory.create(fresh=False)
    directory.draw_secret()
    return directory


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_bounded_and_can_be_stopped(name):
    service = SERVICES[name]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "pinned to a release"
    assert service["init"] is True
    assert service["restart"].startswith("on-failure")
    assert service["profiles"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] not in ("", "0", "root")
    assert int(service["stop_grace_period"].removesuffix("s")) >= 30
    limits = service["deploy"]["resources"]["limits"]
    assert gib(limits["memory"]) > 0 and limits["pids"] > 0
    assert service["logging"]["options"]["max-size"]
    assert "healthcheck" in service or "HEALTHCHECK" in DOCKERFILE
    assert not service.get("ports"), "everything listens on 127.0.0.1 of the host's network"
    assert "privileged" not in service and "docker.sock" not in str(service)


def test_a_password_must_be_set_and_stands_in_no_argument():
    for name, secret in SECRETS.items():
        with pytest.raises(KeyError, match=name):
            compose({**VALUES, name: ""})
        for service in SERVICES.values():
            assert secret not in str(service.get("command")) + str(service.get("healthcheck"))


def test_the_example_of_env_has_every_variable_and_no_other():
    assert used_variables() | {"COMPOSE_PROFILES"} == env_file().keys()
    profiles = {profile for service in SERVICES.values() for profile in service["profiles"]}
    assert set(env_file()["COMPOSE_PROFILES"].split(",")) <= profiles


def test_variables_of_ours_exist_in_the_program():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "asyncrl").rglob("*.py"))
    for service in OURS.values():
        for name in service["environment"]:
            assert name in source or name in ("HF_TOKEN", "WANDB_API_KEY"), name
    assert StoreConfig().password_env in SERVICES["learner"]["environment"]


@pytest.mark.parametrize("name", OURS)
def test_commands_and_their_options_exist(name):
    command = words(OURS[name])
    group = typer.main.get_command(app)
    group.commands[command[0]].make_context(command[0], command[1:])  # parses, does not run


def test_store_and_learner_agree(tmp_path):
    config = config_of(SERVICES["learner"]["command"])
    settings = dict(
        line.split(" ", 1)
        for line in re.search(r"<<END\n(.*)END", SERVICES["store"]["command"][-1], re.DOTALL)[1].splitlines()
    )
    port = SERVICES["store"]["environment"]["STORE_PORT"]
    assert config.store.url == f"redis://{LEARNER}@{settings['bind']}:{port}/0"
    command = words(SERVICES["generators"])
    assert command[command.index("--store") + 1] == f"redis://{GENERATOR}@{settings['bind']}:{port}/0"
    assert settings["port"] == "$STORE_PORT" and "requirepass" not in settings
    assert (
        SERVICES["generators"]["environment"]["ASYNCRL_STORE_PASSWORD"]
        == SECRETS["ASYNCRL_GENERATOR_PASSWORD"]
    )
    assert SERVICES["learner"]["environment"]["ASYNCRL_STORE_PASSWORD"] == SECRETS["ASYNCRL_STORE_PASSWORD"]
    assert "ASYNCRL_GENERATOR_PASSWORD" not in SERVICES["learner"]["environment"]
    assert settings["maxmemory-policy"] == "noeviction" and settings["appendfsync"] == config.store.fsync
    assert gib(settings["maxmemory"]) == 1.5 * config.store.max_gib
    assert gib(SERVICES["store"]["deploy"]["resources"]["limits"]["memory"]) > gib(settings["maxmemory"])
    assert settings["dir"] in [volume.split(":")[1] for volume in SERVICES["store"]["volumes"]]
    assert config.control.bind.startswith("tcp://127.0.0.1:")
    longest_s = 2 * MARGIN * config.control.slow_s
    for name in ("learner", "box"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > longest_s + LEAVE_S


def rows_of_the_readme() -> list[dict[str, str]]:
    table = re.search(r"\| GPUs \|.*?\n\n", (DEPLOY / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


@pytest.mark.parametrize("row", rows_of_the_readme(), ids=lambda row: row["GPUs"])
def test_every_gpu_has_one_owner(row, monkeypatch):
    values = VALUES | {key: value for key, value in row.items() if value}
    services = {
        name: service
        for name, service in compose(values)["services"].items()
        if row["COMPOSE_PROFILES"] in service["profiles"]
    }
    if row["COMPOSE_PROFILES"] == "box":
        config = config_of(services["box"]["command"])
        placement = placement_of(config, int(row["GPUs"]))
        assert len(placement.generators) == 1
        return
    config = config_of(services["learner"]["command"])
    dealt = []
    for service in ("learner", "generators"):
        assert services[service]["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"
        monkeypatch.setenv(
            "CUDA_VISIBLE_DEVICES", str(services[service]["environment"]["CUDA_VISIBLE_DEVICES"])
        )
        has_learner = service == "learner"
        placement = placement_of(
            config,
            gpus.count_gpus(),
            generators=0 if has_learner else config.generator.count,
            has_learner=has_learner,
        )
        for seat in (*placement.ranks, *placement.generators):
            assert not seat.is_shared
            dealt.append(gpus.visible_devices(seat.gpus))
        assert not list(misplaced(config, gpus.count_gpus(), generators=False)) or not has_learner
    names = [name for part in dealt for name in part.split(",")]
    assert sorted(names) == [str(index) for index in range(int(row["GPUs"]))]
    # Another container does not see the learner's processes, so no slot: with an address, auto is tcp.
    one_host = config.control.bind is None
    assert choose_transport(config.weights.transport, one_host=one_host) == "tcp"
    assert str(config.generator.count) == words(services["generators"])[2]


def test_versions_agree():
    assert {service["image"] for service in OURS.values()} == {f"asyncrl:{__version__}"}
    assert f"-t asyncrl:{__version__} " in DOCKERFILE
    base = re.search(r"^FROM vllm/vllm-openai:v(\S+)$", DOCKERFILE, re.MULTILINE)[1]
    (vllm,) = [one for one in map(Requirement, PROJECT["optional-dependencies"]["gpu"]) if one.name == "vllm"]
    assert vllm.specifier.contains(base)


# vLLM pins these, by its device.
OF_THE_ENGINE = re.compile(r"vllm(-cpu)?|torch(vision|audio|codec)?|triton|nvidia-.*|cuda-.*|apache-tvm-ffi")


def pins() -> dict[str, list[Requirement]]:
    """The lines of deploy/constraints.txt by package: several where platforms or Pythons differ."""
    found: dict[str, list[Requirement]] = {}
    for line in (DEPLOY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith("#"):
            one = Requirement(line)
            assert one.url is None and [spec.operator for spec in one.specifier] == ["=="], line
            found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


def test_every_dependency_is_pinned_to_a_release_that_we_allow():
    extras = {name: texts for name, texts in PROJECT["optional-dependencies"].items() if name != "all"}
    texts = [*PROJECT["dependencies"], *(text for each in extras.values() for text in each)]
    for wanted in map(Requirement, texts):
        name = canonicalize_name(wanted.name)
        if name != PROJECT["name"] and not OF_THE_ENGINE.fullmatch(name):
            releases = [next(iter(pin.specifier)).version for pin in pins()[name]]
            assert all(map(wanted.specifier.contains, releases)), (wanted, releases)
    assert "--constraint deploy/constraints.txt" in (DEPLOY / "install.sh").read_text(encoding="utf-8")


def test_whatever_the_pinned_packages_bring_is_pinned_too():
    """Of what is installed here: asyncrl with its extras, and all that they require."""
    pinned, missing = pins(), set[str]()
    asked: list[tuple[str, frozenset[str]]] = [(PROJECT["name"], frozenset({"all", "cpu", "dev"}))]
    for name, extras in asked:
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for one in map(Requirement, required):
            if one.marker is not None and not any(one.marker.evaluate({"extra": e}) for e in extras | {""}):
                continue
            here = canonicalize_name(one.name)
            if (step := (here, frozenset(one.extras))) not in asked:
                asked.append(step)
            if here != PROJECT["name"] and not OF_THE_ENGINE.fullmatch(here):
                mine = [pin for pin in pinned.get(here, ()) if pin.marker is None or pin.marker.evaluate()]
                releases = [next(iter(pin.specifier)).version for pin in mine]
                if len(releases) != 1 or not one.specifier.contains(releases[0], prereleases=True):
                    missing.add(f"{one} of {name}: pinned {releases}")
    assert len(asked) > 150 and not missing, "make lock"


def test_what_the_base_image_has_wins_over_our_pins(tmp_path):
    (tmp_path / "base.txt").write_text("PyYAML==6.0.2\nprometheus_client==0.22.0\ntorch==2.13.0\n")
    (tmp_path / "constraints.txt").write_text("prometheus-client==0.26.0\npyyaml==6.0.3\nredis==8.1.0\n")
    (command,) = re.findall(r"&& (awk .*) \\\n", DOCKERFILE)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "ours.txt").read_text() == "redis==8.1.0\n"


def test_the_image_holds_what_it_copies_and_nothing_else():
    copied = [
        word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()
    ]
    allowed = re.findall(
        r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / path).exists() for path in copied)
    assert PROJECT["readme"] in copied
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1].isdecimal()
    assert not re.search(r"(?i)^(ENV|ARG).*(token|secret|password|key)", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize(("file", "service"), [("status.json", None), ("metrics/h.9.0.jsonl", "generators")])
def test_health_is_a_file_that_was_written_within_a_minute(tmp_path, file, service):
    if service:
        kind, command = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        argv = ["sh", "-c", command]
    else:
        argv = ["bash", "-c", re.search(r'CMD \["bash", "-c", "(.*)"\]', DOCKERFILE)[1]]
    run = tmp_path / "runs" / "first"
    (run / "metrics").mkdir(parents=True)
    (run / "metrics" / "learner.jsonl").write_text("{}")

    def is_healthy() -> bool:
        return subprocess.run(argv, cwd=tmp_path, check=False, timeout=120).returncode == 0

    assert not is_healthy()
    (run / file).write_text("{}")
    assert is_healthy()
    os.utime(run / file, (time.time() - 90,) * 2)
    assert not is_healthy()


def test_mounted_paths_are_there_or_made_by_the_commands_of_the_readme():
    made = [
        word
        for command in commands(DEPLOY / "README.md")
        if command.program == "mkdir"
        for word in command.words[2:]
    ]
    for name, service in SERVICES.items():
        for source, target, _ in mounts(service):
            if source.startswith((".", "/")):
                assert (DEPLOY / source).is_dir() or source in {
                    path for one in made for path in (one, *map(str, Path(one).parents))
                }
                assert target.startswith("/")
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"
    for service in OURS.values():
        assert service["working_dir"] == "/work"
        assert (VALUES["ASYNCRL_PROJECT"], "/work") in [mount[:2] for mount in mounts(service)]
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_generators_see_of_a_run_directory_the_key_to_join_alone():
    """tests/integration/test_composed_run.py looks from within."""
    project, learner, generators = VALUES["ASYNCRL_PROJECT"], SERVICES["learner"], SERVICES["generators"]
    assert mounts(generators) == [
        ("generators-cache", "/cache", False),
        (f"{project}/runs/join", "/join", True),
        (project, "/work", True),
        (f"{project}/runs/generators", "/work/runs", False),
    ]
    (option,) = [word for word in words(learner) if word.startswith("--join-key=")]
    key = Path("/work") / option.removeprefix("--join-key=")
    assert (
        generators["environment"]["ASYNCRL_SECRET_FILE"] == f"/join/{key.name}"
        and str(key.parent) == "/work/runs/join"
    )
    assert "generators-cache" not in {mount.source for mount in mounts(learner)}
    assert not any(PROJECT_DIRECTORY.rglob(".env*")), "secrets of the other containers"


def test_prometheus_and_grafana_find_what_they_need():
    prometheus, grafana, project = SERVICES["prometheus"], SERVICES["grafana"], VALUES["ASYNCRL_PROJECT"]
    seen = {target: source for service in (prometheus, grafana) for source, target, _ in mounts(service)}
    scraping = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    patterns = [
        pattern
        for one in scraping["scrape_configs"]
        for files in one["file_sd_configs"]
        for pattern in files["files"]
    ]
    written = RunDirectory(Path("runs/some")).target("learner").relative_to("runs")
    for pattern, service in zip(patterns, ("learner", "generators"), strict=True):
        (source,) = [mount.source for mount in mounts(SERVICES[service]) if mount.target == "/work/runs"] or [
            f"{project}/runs"
        ]
        assert seen[str(Path(pattern).parent)] == f"{source}/{written.parent}", (
            "where the service's processes write"
        )
    provider = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/asyncrl.yml").read_text(encoding="utf-8")
    )
    assert provider["providers"][0]["options"]["path"] in seen
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    )
    host, port = source["datasources"][0]["url"].removeprefix("http://").split(":")
    assert grafana["extra_hosts"] == [f"{host}:127.0.0.1"]
    assert f"--web.listen-address=127.0.0.1:{port}" in prometheus["command"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    for name in ("box", "learner"):
        assert config_of(SERVICES[name]["command"]).telemetry.prometheus_port == int(VALUES["METRICS_PORT"])


def test_the_env_file_can_be_filled_in(tmp_path):
    """With the commands of the README, as typed."""
    shutil.copy(DEPLOY / ".env.example", tmp_path)
    typed = [
        command.text
        for command in commands(DEPLOY / "README.md")
        if command.program in ("cp", "sed", "mkdir")
    ]
    assert len(typed) == 4
    subprocess.run(["bash", "-ec", "\n".join(typed)], cwd=tmp_path, check=True, timeout=120)
    values = env_file(tmp_path / ".env")
    passwords = [values["ASYNCRL_STORE_PASSWORD"], values["ASYNCRL_GENERATOR_PASSWORD"]]
    assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in passwords) and len({*passwords}) == 2
    assert re.fullmatch(r"[0-9a-f]{32}", values["GRAFANA_PASSWORD"])
    assert (values["ASYNCRL_UID"], values["ASYNCRL_GID"]) == (str(os.getuid()), str(os.getgid()))
    assert compose(values) != compose(VALUES)


def test_what_the_containers_set_reaches_the_processes(tmp_path, monkeypatch):
    """A role inherits an allow-list only."""
    (env,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    of_image = re.findall(r"(\w+)=", env)
    assert {"HF_HOME", "VLLM_CACHE_ROOT", "USER"} <= {*of_image}
    config = config_of(SERVICES["learner"]["command"])
    for name in {*of_image, *(name for service in OURS.values() for name in service["environment"])}:
        monkeypatch.setenv(name, "0")
    learner = learner_spec(config, run_directory(tmp_path), "redis://x", placement_of(config, 0)).env
    assert {*of_image, *SERVICES["learner"]["environment"]} <= learner.keys()
    generator = child_environment(config, tmp_path, threads=1, gpus=[])
    assert {*of_image, *SERVICES["generators"]["environment"]} - generator.keys() == {SECRET_FILE_VARIABLE}, (
        "the command reads it"
    )
