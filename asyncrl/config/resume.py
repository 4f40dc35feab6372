"""Which keys of a config may change when a run is resumed, and why the others may not.

A key that must not change has the mark `resume` at its field: how strictly, and why. A checkpoint holds the
values of these keys, which are compared with the config before anything is written or started.

Groups that were sampled before a change are trained as they are. If they no longer fit (too long, too old,
without the greedy reward), they are rejected, counted with the reason, and their credit is returned.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.base import Mistake, Part, marked
from asyncrl.config.outline import all_paths, schema_at
from asyncrl.config.wording import shown

# The key defines the run: with another value it is another run.
OTHER_RUN = "another run"
# The weights would fit the new value, but other parts of the checkpoint would not.
REFUSED = "refused"


def refused(why: str) -> Any:
    """Return the mark of a field that must not change for this reason."""
    return marked(resume=(REFUSED, why))


def bound(model: type[Part]) -> dict[str, tuple[str, str]]:
    """Return the keys that must not change, with the kind of the reason and the reason."""
    schemas = {path: schema_at(model, tuple(path.split("."))) for path in all_paths(model)}
    return {path: schema["resume"] for path, schema in schemas.items() if "resume" in schema}


def kept_values(config: Part) -> dict[str, Any]:
    """Return the values of the keys that must not change, as JSON has them; None in a section left out."""
    values: Any = config.model_dump(mode="json")
    return {
        key: functools.reduce(lambda part, name: (part or {}).get(name), key.split("."), values)
        for key in bound(type(config))
    }


def resume_findings(
    model: type[Part], saved: Mapping[str, Any], values: Mapping[str, Any], *, weights: str
) -> Iterator[Mistake]:
    """Find every bound key that `values` changes. `weights` names the directory of the run's newest model."""
    for key, (kind, why) in bound(model).items():
        new = values[key]
        old = saved.get(key, new)  # an earlier release did not record every key
        # Two spellings of one path are the same model.
        if old == new or (
            key == "model.path" and Path(old).exists() and Path(new).exists() and Path(old).samefile(new)
        ):
            continue
        cure = "begin another run (another run.name; or --fresh, which deletes this one)"
        if kind == REFUSED:
            cure = f"begin another run from its weights (another run.name, and model.path={weights})"
        allowed = f"{shown(old)}, with which this run was begun: {why}"
        yield Mistake((key,), f"found {shown(new)}; allowed is {allowed}; set it back, or {cure}")
