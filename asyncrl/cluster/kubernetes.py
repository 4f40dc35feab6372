"""The manifests of a run, for `kubectl apply -f -`, of which `kubernetes.yaml` is the form.

Kubernetes itself places and restarts pods, so that no process of ours does.
"""

import json
import os.path
import re
from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath
from string import Template
from textwrap import indent

from asyncrl.cluster.plans import generators_plan, reachable, store_url
from asyncrl.config.addresses import CONTROL_PORT, STORE_PORT, filled_in
from asyncrl.config.base import Mistake
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.config.sections import ClusterConfig
from asyncrl.run.keys import RunKeys

WORK = PurePosixPath("/work")  # the working directory of deploy/Dockerfile
# The name of a Service has at most 63 characters, and a pod's name has two suffixes behind ours.
NAME, LONGEST = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?"), 40
LABELS = "app.kubernetes.io/name: asyncrl, app.kubernetes.io/instance: {}"
GENERATORS_GRACE_S, MARGIN_S = 90, 100
# The learner writes its status every second.
STATUS = "find {}/status.json -newermt '-60 seconds' | grep -q ."


def problems(config: Config) -> Iterator[Mistake]:
    """Find what Kubernetes refuses, and what pods would not find."""
    if config.cluster.image is None:
        text = (
            "is not set, but cluster.kind is kubernetes; build an image with deploy/Dockerfile, push it, set"
        )
        yield Mistake(
            ("cluster.image", "cluster.kind"), f"cluster.image {text} cluster.image=REGISTRY/NAME:TAG"
        )
    name = config.run.name
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        allowed = f"allowed are a letter, then letters, digits and hyphens, in lower case, {LONGEST} at most"
        yield Mistake(("run.name",), f"found {name}, which Kubernetes refuses as a name; {allowed}")
    for key, bind in (("store.bind", config.store.bind), ("control.bind", config.control.bind)):
        if bind is not None and filled_in(bind, "pod", 0) == bind:
            text = f"found {bind}, but a pod has an address only when it starts; set tcp://auto:PORT"
            yield Mistake((key,), text)
    if (hosts := config.cluster.learner_hosts) > 1:
        text = (
            f"found {hosts}, but under Kubernetes the learner is one pod; leave it out, with GPUs of one node"
        )
        yield Mistake(("cluster.learner_hosts",), text)
    if config.store.url is not None:
        text = f"found {config.store.url}, but under Kubernetes the learner's pod has the store; leave it out"
        yield Mistake(("store.url",), text)
    for key, text in _texts(config.model_dump(mode="json")):
        path = Path(text.partition(":")[0])
        is_here = path.is_absolute() and bool(path.name) and os.path.exists(path) and key != "run.root"
        if is_here or text.startswith("../"):
            yield Mistake(
                (key,),
                f"found {text}, a path of this machine, but pods see their image, in which {WORK} stands for "
                f"this directory; move it below this directory, name it from here, and COPY it to {WORK}",
            )


def _texts(value: object, *keys: str) -> Iterator[tuple[str, str]]:
    """Yield each text of a config with its key."""
    if isinstance(value, str):
        yield ".".join(keys), value
    elif isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(part, *keys, str(key))


def rendered(config: Config, keys: RunKeys | None) -> str:
    """Return all objects of a run as YAML; without `keys` for people to read."""
    name, cluster, ours = config.run.name, config.cluster, reachable(config)
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    *objects, pod = text.replace("$labels", LABELS.format(name)).split("---\n")
    if cluster.claim is not None:
        objects = [one for one in objects if "kind: PersistentVolumeClaim" not in one]
    claim, file = json.dumps(cluster.claim or name), f"/etc/asyncrl/{name}.yaml"
    count, plan = config.generator.count or 1, generators_plan(config, Path(file), 0, None, on_gpus=True)
    values: dict[str, object] = {
        "run": name,
        # In a pod it is the config of one command.
        "config": indent(dump_config(ours.model_copy(update={"cluster": ClusterConfig()})), "    "),
        "run_key": keys.secret.hex() if keys else "",
        "join_key": keys.join.text() if keys else "",
        "store_port": str(filled_in(ours.store.bind, "pod", STORE_PORT)).rpartition(":")[2],
        "control_port": str(filled_in(ours.control.bind, "pod", CONTROL_PORT)).rpartition(":")[2],
        "claim": claim,
        "claim_gib": cluster.claim_gib,
        "restarts": config.control.max_restarts,
        "status": json.dumps(STATUS.format(WORK / config.run.directory)),
        "hosts": cluster.generator_hosts,
        "image": json.dumps(cluster.image),
        "work": WORK,
        "root": json.dumps(str(WORK / config.run.root)),
    }
    argv = ["generator", "--config", file, "--count", str(count), "--name", "$(POD_NAME)"]
    argv += ["--store", store_url(ours, f"{name}-learner"), "--wait", f"{cluster.pending_s:g}"]
    limit = "nvidia.com/gpu: {}" if config.learner.device != "cpu" else ""
    values["learner"] = Template(pod.rstrip()).substitute(
        values,
        role="learner",
        restart="Never",
        # As long as the supervisor in it gives the learner to end its step and to save.
        grace_s=ceil(4 * config.control.slow_s) + MARGIN_S,
        args=json.dumps(["learner", "--config", file]),
        key="run.key",
        runs=f"persistentVolumeClaim: {{claimName: {claim}}}",
        gpus=limit.format(config.learner.ranks),
    )
    values["generators"] = Template(pod.rstrip()).substitute(
        values,
        role="generators",
        restart="Always",
        grace_s=GENERATORS_GRACE_S,
        args=json.dumps(argv),
        key="join.key",
        runs="emptyDir: {}",
        gpus=limit.format(plan.gpus),
    )
    return "---\n".join(Template(one).substitute(values) for one in objects)
