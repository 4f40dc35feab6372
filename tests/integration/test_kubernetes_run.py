"""The manifests of a run without a cluster: schemas accept them, and processes with what a pod mounts train.

bubblewrap stands in for the kubelet: a process sees the system, its volumes, and the learner's name. If root
runs the test, the process has the pod's user, and what is mounted has the owner and mode that a kubelet gives.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import asyncrl
from asyncrl.cluster.kubernetes import rendered
from asyncrl.config.schema import Config
from asyncrl.rewards.reward_process import reward_sandbox
from asyncrl.run.keys import RunKeys
from tests.support.command import ASYNCRL
from tests.support.libraries import python_with
from tests.support.ports import free_ports
from tests.support.waiting import wait_until
from tests.support.whole_run import steps, tiny_run

PROBLEM = reward_sandbox((), Path("runs")).problem()
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
WAIT_S = 400.0
# So many that a generator which loads its model late still takes part.
STEPS = 60
VERSIONS = ("1.29", "1.34", "1.37")


@pytest.fixture(scope="session")
def validator(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("validator") / "python"
    python = python_with(directory, ["kubernetes-validate==1.37.0"], ["kubernetes_validate"])
    return [str(python), "-m", "kubernetes_validate", "--strict"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_a_release_accept_every_object(validator, version, tmp_path):
    values = {
        "run": {"name": "far"},
        "model": {"path": "some/model"},
        "data": {"train": "some/rows"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "generator": {"count": 4},
    }
    kinds = [
        {"kind": "kubernetes", "image": "here/asyncrl:1"},
        {"kind": "kubernetes", "image": "here/asyncrl:1", "claim": "ours"},
    ]
    texts = [
        rendered(Config.model_validate({**values, "cluster": kind}), RunKeys(bytes(32))) for kind in kinds
    ]

    def said(text: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "run.yaml").write_text(text)
        command = [*validator, "--kubernetes-version", version, str(tmp_path / "run.yaml")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for text in texts:
        found = said(text)
        assert found.returncode == 0, found.stdout + found.stderr
        assert (found.stdout + found.stderr).count("passed for resource") == text.count("apiVersion:")
        assert said(text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds")).returncode


class Pod:
    """The process of a pod: its volumes where its manifest mounts them, and its arguments unchanged."""

    def __init__(self, name: str, objects: list[dict], template: dict, project: Path, aside: Path) -> None:
        [self.container] = template["spec"]["containers"]
        self.name, self.output = name, aside / f"{name}.out"
        (aside / "hosts").write_text("127.0.0.1 localhost whole-learner\n")
        self.volumes = aside / name
        group = template["spec"]["securityContext"]["fsGroup"] if os.geteuid() == 0 else None
        by_name = {f"{one['kind']} {one['metadata']['name']}": one for one in objects}
        for volume in template["spec"]["volumes"]:
            place = self.volumes / volume["name"]
            place.mkdir(parents=True)
            files, mode = {}, 0o444
            if "configMap" in volume:
                files = by_name[f"ConfigMap {volume['configMap']['name']}"]["data"]
            elif "secret" in volume:
                mode = volume["secret"]["defaultMode"]
                files = by_name[f"Secret {volume['secret']['secretName']}"]["stringData"]
            for file, text in files.items():
                (place / file).write_text(text)
                (place / file).chmod(mode | (0o040 if group else 0))
                os.chown(place / file, -1, group or -1)
            os.chown(place, -1, group or -1)
            place.chmod(0o2775 if "secret" not in volume else 0o2755)
        self.argv = ["bwrap", "--die-with-parent", "--unshare-pid", "--proc", "/proc", "--dev", "/dev"]
        self.argv += [
            "--perms",
            "1777",
            "--tmpfs",
            "/tmp",
            "--bind",
            str(project),
            self.container["workingDir"],
        ]
        own = [sys.base_prefix, sys.prefix, str(Path(asyncrl.__file__).parents[1])]
        etc = ["/etc/passwd", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/ssl"]
        for path in ["/sys", "/usr", "/bin", "/sbin", "/lib", "/lib64", *etc, *own]:
            for above in [*Path(path).parents][-2::-1]:  # else they are root's alone
                self.argv += ["--perms", "0755", "--dir", str(above)]
            self.argv += ["--ro-bind-try", path, path]
        self.argv += ["--ro-bind", str(aside / "hosts"), "/etc/hosts"]
        for mount in self.container["volumeMounts"]:
            how = "--ro-bind" if mount.get("readOnly") else "--bind"
            self.argv += [how, str(self.volumes / mount["name"]), mount["mountPath"]]
        self.argv += ["--chdir", self.container["workingDir"], "--"]
        if group:
            user = str(template["spec"]["securityContext"]["runAsUser"])
            self.argv += ["setpriv", "--reuid", user, "--regid", str(group), "--clear-groups"]

    def start(self) -> None:
        env = {one["name"]: one.get("value", self.name) for one in self.container["env"]}
        args = [word.replace("$(POD_NAME)", self.name) for word in self.container["args"]]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.argv, *ASYNCRL, *args],
                # The route to the other pods is that of this machine to itself.
                env=os.environ | env | {"ASYNCRL_PEERS": "127.0.0.1", "HOME": "/tmp"},
                stdout=output,
                stderr=output,
            )

    def is_ready(self) -> bool:
        command = self.container["readinessProbe"]["exec"]["command"]
        return subprocess.run([*self.argv, *command], capture_output=True, check=False).returncode == 0


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[tuple[Pod, Pod]]:
    project, aside = tmp_path / "project", tmp_path / "aside"
    project.mkdir(mode=0o755)
    aside.mkdir()
    with tiny_run(project) as config:
        values = yaml.safe_load(config.read_text().replace(f"{project}/", "./"))
        values["cluster"] = {"kind": "kubernetes", "image": "none"}
        values["learner"]["steps"] = STEPS
        store, control = free_ports(2)
        values["store"], values["control"] = (
            {"bind": f"tcp://auto:{store}"},
            {"bind": f"tcp://auto:{control}"},
        )
        config.write_text(yaml.safe_dump(values))
        command = [*ASYNCRL, "up", "--config", config.name]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        objects = [*yaml.safe_load_all(done.stdout)]
        shutil.rmtree(project / "runs")  # which has run.key, and is not in the image
        for path in project.rglob("*"):
            path.chmod(path.stat().st_mode | 0o444)
        templates = [one["spec"]["template"] for one in objects if one["kind"] in ("Job", "Deployment")]
        made = [
            Pod(name, objects, template, project, aside)
            for name, template in zip(("whole-learner-0-x", "whole-generators-1-y"), templates, strict=True)
        ]
        yield made[0], made[1]
        for pod in made:
            pod.process.kill()
            pod.process.wait(60)


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_processes_with_what_the_manifests_mount_train_together(pods: tuple[Pod, Pod]) -> None:
    learner, generators = pods
    generators.start()
    learner.start()
    run = learner.volumes / "runs" / "whole"

    def said() -> str:
        return "\n".join(pod.output.read_text()[-3000:] for pod in pods)

    def is_over() -> bool:
        assert not any(pod.process.poll() for pod in pods), said()
        ready.append(learner.is_ready())
        members.update(
            path.stem for path in (generators.volumes / "runs" / "whole" / "metrics").glob("*.jsonl")
        )
        return all(pod.process.poll() is not None for pod in pods)

    ready, members = list[bool](), set[str]()
    wait_until(is_over, WAIT_S, said)
    assert steps(run) == [*range(1, STEPS + 1)]
    assert ready[0] is False and True in ready
    assert members == {"whole-generators-1-y.g0", "whole-generators-1-y.g1"}
    [key] = [path.read_text() for path in (learner.volumes / "keys").iterdir()]
    assert (run / "run.key").read_text() == key
    found = [path for path in generators.volumes.rglob("*") if path.is_file() and key in path.read_text()]
    assert not found, "the learner's key is in no file of a pod of generators"
