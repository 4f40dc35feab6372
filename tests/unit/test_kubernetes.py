"""The manifests of a run: who gets which key, what reaches what, and that every command is one of ours."""

import json
import sys

import pytest
import typer
import yaml

from asyncrl.cli.app import app
from asyncrl.cli.app import run as typed
from asyncrl.cluster.kubernetes import GENERATORS_GRACE_S, problems, rendered
from asyncrl.cluster.plans import reachable
from asyncrl.commands.down import MARGIN, PATIENCE_S
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import ClusterConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.run.keys import RunKeys

KEYS = RunKeys(bytes(range(32)))
PLAIN = {
    "run": {"name": "far-7b"},
    "model": {"path": "some/model"},
    "data": {"train": "rows.jsonl"},
    "reward": {"functions": [{"function": "exact_match"}]},
    "generator": {"count": 4, "tensor_parallel": 2},
    "learner": {"ranks": 2},
    "cluster": {"kind": "kubernetes", "generator_hosts": 3, "image": "here/asyncrl:1"},
}


def config(**parts) -> Config:
    return Config.model_validate({**PLAIN, **parts})


def objects(text: str) -> dict[str, dict]:
    return {f"{one['kind']} {one['metadata']['name']}": one for one in yaml.safe_load_all(text)}


@pytest.fixture
def found() -> dict[str, dict]:
    return objects(rendered(config(), KEYS))


def pods(found: dict[str, dict]) -> dict[str, dict]:
    names = {"learner": "Job far-7b-learner", "generators": "Deployment far-7b-generators"}
    return {role: found[name]["spec"]["template"] for role, name in names.items()}


def container(pod: dict) -> dict:
    [only] = pod["spec"]["containers"]
    return only


def volume(pod: dict, name: str) -> dict:
    [only] = [one for one in pod["spec"]["volumes"] if one["name"] == name]
    return only


def test_each_role_gets_its_own_key_as_a_file_and_no_other_object_has_one(found):
    keys = {role: found[f"Secret far-7b-{role}"]["stringData"] for role in ("learner", "generators")}
    assert keys == {"learner": {"run.key": KEYS.secret.hex()}, "generators": {"join.key": KEYS.join.text()}}
    for role, pod in pods(found).items():
        assert volume(pod, "keys")["secret"] == {"secretName": f"far-7b-{role}", "defaultMode": 0o400}
        mounts = {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}
        named = {one["name"]: one.get("value") for one in container(pod)["env"]}["ASYNCRL_SECRET_FILE"]
        assert mounts["/keys"] == "keys" and named == f"/keys/{next(iter(keys[role]))}"
    others = json.dumps([one for one in found.values() if one["kind"] != "Secret"])
    assert not any(key in others for key in (KEYS.secret.hex(), KEYS.join.text(), KEYS.join.secret.hex()))


def test_every_command_is_one_of_ours_on_a_config_that_is_the_users(found, tmp_path):
    [(file, text)] = found["ConfigMap far-7b"]["data"].items()
    (tmp_path / file).write_text(text)
    alone = reachable(config()).model_copy(update={"cluster": ClusterConfig()})
    assert load_config(tmp_path / file) == alone, "in a pod each command checks the machine that it is on"
    commands = typer.main.get_command(app).commands
    for role, pod in pods(found).items():
        [mount] = [one for one in container(pod)["volumeMounts"] if one["name"] == "config"]
        assert container(pod)["command"] == ["asyncrl"]
        words = [word.replace(mount["mountPath"], str(tmp_path)) for word in container(pod)["args"]]
        parsed = commands[words[0]].make_context(words[0], words[1:]).params
        assert {str(parsed["config"]), *(parsed.get("words") or ())} == {str(tmp_path / file)}, role
    assert (parsed["count"], parsed["wait"], parsed["name"]) == (4, 300, "$(POD_NAME)")


def test_the_learner_is_found_by_its_name_and_only_by_pods_of_the_run(found):
    service, learner = found["Service far-7b-learner"], pods(found)["learner"]
    assert service["spec"]["selector"].items() <= learner["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert "redis://generator@far-7b-learner:16379/0" in container(pods(found)["generators"])["args"]
    assert [port["port"] for port in service["spec"]["ports"]] == [16379, 16380]
    policy = found["NetworkPolicy far-7b"]["spec"]
    [rule] = policy["ingress"]
    assert "ports" not in rule and rule["from"] == [{"podSelector": policy["podSelector"]}]
    for pod in pods(found).values():
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    selector = found["Deployment far-7b-generators"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pods(found)["generators"]["metadata"]["labels"].items()
    assert not selector.items() <= learner["metadata"]["labels"].items()


def test_the_users_ports_are_those_of_the_service():
    chosen = config(store={"bind": "tcp://auto:7000"}, control={"bind": "tcp://auto:7001"})
    found = objects(rendered(chosen, None))
    assert [port["port"] for port in found["Service far-7b-learner"]["spec"]["ports"]] == [7000, 7001]
    assert "redis://generator@far-7b-learner:7000/0" in container(pods(found)["generators"])["args"]


def test_pods_get_their_gpus_time_to_save_and_no_rights(found):
    limits = {role: container(pod)["resources"]["limits"] for role, pod in pods(found).items()}
    assert limits == {"learner": {"nvidia.com/gpu": 2}, "generators": {"nvidia.com/gpu": 8}}
    assert found["Deployment far-7b-generators"]["spec"]["replicas"] == 3
    cpu = pods(objects(rendered(config(learner={"device": "cpu"}), None)))
    assert [container(pod)["resources"]["limits"] for pod in cpu.values()] == [{}, {}]
    grace_s = {role: pod["spec"]["terminationGracePeriodSeconds"] for role, pod in pods(found).items()}
    assert grace_s["learner"] >= 2 * MARGIN * config().control.slow_s + PATIENCE_S
    assert grace_s["generators"] == GENERATORS_GRACE_S
    for pod in pods(found).values():
        assert container(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert "/dev/shm" in {mount["mountPath"] for mount in container(pod)["volumeMounts"]}


def test_a_mistake_ends_the_job_and_an_eviction_does_not_count(found):
    spec = found["Job far-7b-learner"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    did = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules]
    assert did == [("Ignore", None), ("Ignore", [130, 143]), ("FailJob", [2])]
    assert spec["backoffLimit"] == config().control.max_restarts
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "which podFailurePolicy demands"


def test_a_claim_is_made_unless_one_is_named(found):
    made = found["PersistentVolumeClaim far-7b"]["spec"]["resources"]["requests"]["storage"]
    claim = volume(pods(found)["learner"], "runs")["persistentVolumeClaim"]["claimName"]
    assert (made, claim) == ("100Gi", "far-7b")
    named = objects(rendered(config(cluster=PLAIN["cluster"] | {"claim": "ours"}), None))
    assert "PersistentVolumeClaim" not in {one["kind"] for one in named.values()}
    assert volume(pods(named)["learner"], "runs")["persistentVolumeClaim"]["claimName"] == "ours"


@pytest.mark.parametrize("name", ["Upper", "with_line", "7b", "a.b", "a" * 41, "ends-"])
def test_a_name_that_kubernetes_refuses_is_refused_here(name):
    [mistake] = problems(config(run={"name": name}))
    assert mistake.keys == ("run.name",) and "lower case" in mistake.text


def test_what_a_pod_would_not_find_is_named_with_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "rewards.py"):
        (tmp_path / name).touch()
    far = config(
        cluster={"kind": "kubernetes", "learner_hosts": 2},
        learner={"ranks": 2},
        data={"train": str(tmp_path / "rows.jsonl"), "eval": "../rows.jsonl"},
        reward={"functions": [{"function": f"{tmp_path}/rewards.py:odd"}]},
        control={"bind": "tcp://10.0.0.1:7000"},
        store={"url": "rediss://s:6379/0"},
        sampling={"stop": ["/", "\n/"]},
    )
    keys = {mistake.keys[0] for mistake in problems(far)}
    places = {"data.train", "data.eval", "reward.functions.0.function"}
    assert keys == {"cluster.image", "cluster.learner_hosts", "control.bind", "store.url"} | places
    assert not [*problems(config())]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "task.yaml").write_text(json.dumps(PLAIN))
    return tmp_path / "task.yaml"


def test_the_key_is_drawn_once_and_nothing_else_is_printed(file, capsys):
    printed = []
    for _ in range(2):
        assert typed(["up", str(file)]) == 0
        out, said = capsys.readouterr()
        printed.append(out)
        assert said.count("! not encrypted between hosts: store (store.bind), weights (control.bind)") == 1
    assert printed[0] == printed[1]
    key = (file.parent / "runs/far-7b/run.key").read_text()
    assert objects(printed[0])["Secret far-7b-learner"]["stringData"] == {"run.key": key}
    assert [path.name for path in (file.parent / "runs/far-7b").iterdir()] == ["run.key"], (
        "nothing is started"
    )


def test_a_look_draws_no_key_and_a_terminal_gets_none(file, capsys, monkeypatch):
    assert typed(["up", "--dry-run", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "# generators-* must reach every port of far-7b-learner: weights (control.bind)" in printed
    secret = objects(printed)["Secret far-7b-learner"]["stringData"]
    assert secret == {"run.key": ""} and not (file.parent / "runs").exists()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match=r"standard output is a terminal.*kubectl apply -f -"):
        typed(["up", str(file)])
    assert not (file.parent / "runs").exists()


def test_a_fresh_start_is_the_deletion_of_the_claim(file):
    with pytest.raises(RunError, match="kubectl delete pvc far-7b"):
        typed(["up", "--fresh", str(file)])


def test_mistakes_of_a_run_on_kubernetes_stand_with_the_others(file):
    with pytest.raises(ConfigError, match=r"(?s)data\.train: found no.*run\.name: found A_B") as caught:
        typed(["validate", str(file), "run.name=A_B", "data.train=none.jsonl", "learner.ranks=64"])
    assert "learner.ranks" not in str(caught.value), "of the GPUs of this machine nothing is asked"
