"""The experts that routers choose: recorded while an engine samples, and chosen again by the learner.

A router of transformers is a module of its own, which scores E experts and takes the best K by `topk`. Here
only the answer of that call is read or replaced. So the weights of the experts are those of the model's own
code from its own scores, and gradients flow through them.

Axes in names:  N tokens, L routers, K experts of a token; B responses.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from asyncrl.columns import NONE
from asyncrl.errors import ConfigError

# The choices of all routers that this thread has run.
_choices: ContextVar[list[Tensor] | None] = ContextVar("choices", default=None)


class _Chooses(TorchFunctionMode):
    """Replaces the choice of a router by its `replayed_NK`; rows that are not whole choose freely."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self._router: Any = router

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        sizes = (args[0].dim(), args[0].shape[-1], result.indices.shape[-1])
        # Some routers choose groups of experts first.
        if sizes != (2, self._router.num_experts, self._router.top_k):
            return result
        values_NK, indices_NK = result
        if (replayed_NK := self._router.replayed_NK) is not None:
            is_whole_N1 = (replayed_NK >= 0).all(-1, keepdim=True)
            indices_NK = torch.where(is_whole_N1, replayed_NK.long(), indices_NK)
            values_NK = args[0].gather(-1, indices_NK)
        if (choices := _choices.get()) is not None:
            choices.append(indices_NK.to("cpu", torch.int16))
        return torch.return_types.topk((values_NK, indices_NK))


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of a model of transformers, in the order in which they run."""
    return [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, name, None), int) for name in ("top_k", "num_experts"))
        and not hasattr(module, "experts")
    ]


def routing_sizes(model: nn.Module, path: str) -> Mapping[str, int]:
    """Return the sizes of what a model's routers choose. Raises ConfigError for one without routers."""
    routers = routers_of(model)
    sizes = {(router.top_k, router.num_experts) for router in routers}
    if len(sizes) != 1:
        found = f"model.router_replay: {path} has " + ("routers of several kinds" if sizes else "no experts")
        raise ConfigError(f"{found}; remove the key, or choose a mixture of experts such as qwen3_moe")
    ((top_k, experts),) = sizes
    return {"layers": len(routers), "top_k": top_k, "experts": experts}


def watch(model: nn.Module) -> list[Any]:
    """Let choices of a model's routers be recorded and replayed; return the routers."""
    routers = routers_of(model)
    for router in routers:
        router.replayed_NK = None
        router.forward = partial(_routed, router, router.forward)
    return routers


def _routed(router: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with _Chooses(router):
        return forward(*args, **kwargs)


def replay(routers: Sequence[Any], experts_NLK: Tensor | None) -> None:
    """Let the routers choose these experts, until the next call: the backward pass may run them again."""
    for layer, router in enumerate(routers):
        router.replayed_NK = None if experts_NLK is None else experts_NLK[:, layer]


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Yield the choices that watched routers make in this thread."""
    choices: list[Tensor] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def experts_of_tokens(choices: Sequence[Tensor], routers: int, count: int) -> Tensor:
    """experts_BNLK of `count` responses with their prompt; the last token of each was not run."""
    top_k = choices[0].shape[-1]
    passes = [
        torch.stack(list(choices[first : first + routers]), dim=1).view(count, -1, routers, top_k)
        for first in range(0, len(choices), routers)
    ]
    return pad(torch.cat(passes, dim=1), (0, 0, 0, 0, 0, 1), value=NONE)
