"""`verifiers:TASKSET`, for example `verifiers:gsm8k?split=train`: tasks of verifiers 0.4 (`verifiers.v1`).

The column `task` has the task's data, and the library runs the episode: setup, servers of tools, rewards and
metrics. Its chat harness is a program that `uv` installs; here its loop runs in this process. Calls of the
model pass the library's local server, which asks the task's stop conditions and interceptors, and go on to
the session of the episode.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.mcp import serve_shared
from verifiers.v1.runtimes import runtime_is_local

from asyncrl.addons.adapters.base import split_options
from asyncrl.environments.base import BudgetSpent

CONNECT_S = 60.0
# What the library calls our budgets.
SPENT = {"turns": "max_turns", "length": "max_total_tokens"}


def environment(name: str) -> Any:
    """Return a rollout. Options are those of the taskset's config.

    Raises ImportError, ValueError for an option, and TypeError for a taskset that is not played here.
    """
    taskset = _taskset(name)
    task_type = taskset.task_type()
    data_type = task_type.data_type()
    stack = AsyncExitStack()
    serving: asyncio.Task[Mapping[str, Any]] | None = None  # the tools that the episodes of a process share

    async def rollout(session: Any, task: Mapping[str, Any]) -> dict[str, float]:
        nonlocal serving
        played = task_type(data_type.model_validate(task), taskset.config.task)
        if serving is None or (serving.done() and serving.exception()):
            shared = serve_shared(taskset.toolsets(taskset.config))
            serving = asyncio.create_task(stack.enter_async_context(shared))
        tools = await asyncio.shield(serving)
        harness, model = NullHarnessConfig(id="null"), _Model(session)
        config = vf.AgentConfig(model="policy", harness=harness, runtime=vf.SubprocessConfig())
        async with _Server(model, tools) as server:
            agent = vf.Agent(config, interception=server)
            agent.harness = _Chat(harness, model)
            trace = await agent.run(played, tools=tools)
        if model.spent and not trace.num_turns:  # no turn was left for the first one
            raise model.spent
        if not trace.ok or None in trace.rewards.values():
            error = trace.last_error
            why = f"{error.type}: {error.message}" if error else f"no reward after {trace.stop_condition}"
            raise RuntimeError(f"the task of verifiers:{name} failed: {why}")
        session.metrics |= trace.metrics
        return {one: reward.value for one, reward in trace.rewards.items()}

    return rollout


def rows(name: str, *, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return tasks as rows with the columns `prompt` and `task`, shuffled if their number is finite.

    Raises ValueError for a task that a row cannot have, or that has no text as its prompt.
    """
    taskset = _taskset(name)
    for task in (taskset.shuffle(seed) if taskset.bounded else taskset).take(size):
        prompt = [_read(one) for one in _opening(task.data.system_prompt, task.data.prompt)]
        if not any(message["role"] == "user" for message in prompt):
            raise ValueError(f"task {task.data.idx} has no prompt: it wants a user, which is not played here")
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        if type(task.data).model_validate(data) != task.data:
            raise ValueError(f"task {task.data.idx} has fields that JSON does not keep, and a row is JSON")
        yield {"prompt": prompt, "task": data}


def _taskset(name: str) -> Any:
    """The taskset, unless it needs what is not played here. Raises TypeError."""
    taskset_id, options = split_options(name)
    config = vf.taskset_config_type(taskset_id).model_validate({"id": taskset_id, **options})
    taskset = vf.load_taskset(config)
    task_type, allowed = taskset.task_type(), "allowed are tasksets that one agent plays with tools"
    if (own := vf.environment_class(taskset_id)) is not vf.SingleAgentEnv:
        raise TypeError(f"verifiers:{taskset_id} has an environment of its own, {own.__name__}; {allowed}")
    if vf.default_harness_id(taskset_id) == taskset_id:
        raise TypeError(f"verifiers:{taskset_id} has a harness of its own; {allowed}")
    if task_type.NEEDS_CONTAINER:
        raise TypeError(f"verifiers:{taskset_id}: {task_type.__name__} needs a container; {allowed}")
    for tools in (*taskset.toolsets(config), *task_type.toolsets(config.task)):
        if not tools.config.url and not runtime_is_local(tools.config.runtime):
            found = f"its {type(tools).__name__} runs in {tools.config.runtime.type}"
            raise TypeError(f"verifiers:{taskset_id}: {found}; {allowed} that run on this host")
    return taskset


class _Server(InterceptionServer):  # type: ignore[misc]
    """The library's server between an agent and its model, for one episode."""

    def __init__(self, model: "_Model", tools: Mapping[str, Any]) -> None:
        super().__init__(state_service_secrets=[one.state_secret for one in tools.values()])
        self._model = model

    def register(self, session: Any) -> tuple[str, str]:
        """Give a rollout its secrets, and our model instead of a client for a URL."""
        secrets: tuple[str, str] = super().register(session)
        session.client = self._model
        return secrets


class _Model(vf.Client):  # type: ignore[misc]
    """The model of one episode: it speaks through the session."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.spent: BudgetSpent | None = None

    async def get_response(self, dialect: Any, body: Any, *_: Any, **__: Any) -> Any:
        """Return the answer to a request in OpenAI's form. Raises ProviderError if no turn is left."""
        try:
            messages = [_read(message) for message in body["messages"]]
            answer = await self._session.chat(messages, tools=body.get("tools") or ())
        except BudgetSpent as spent:
            self.spent = spent
            raise vf.ProviderError(str(spent), status_code=400) from spent
        message = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning or None}
        if answer.tool_calls:
            message["tool_calls"] = []
        for call in answer.tool_calls:
            text = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            function = {"name": call.name, "arguments": text}
            message["tool_calls"].append({"id": call.id, "type": "function", "function": function})
        used = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens}
        raw = {
            "id": "asyncrl", "object": "chat.completion", "created": 0, "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason}],
            "usage": used | {"total_tokens": sum(used.values())},
        }  # fmt: skip
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class _Chat(vf.Harness[NullHarnessConfig]):  # type: ignore[misc]
    """Talks until an answer has no call, as the library's harness `null` does in a program of its own."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    def __init__(self, config: NullHarnessConfig, model: _Model) -> None:
        super().__init__(config)
        self._model = model

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Play the episode. Raises RuntimeError if a call of the model is refused."""
        messages = _opening(*self.resolve_prompt(data))
        places = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            bearer = {"Authorization": f"Bearer {secret}"}
            # It calls this process only, and so needs neither certificates nor proxies.
            http = httpx.AsyncClient(headers=bearer, timeout=None, verify=False, trust_env=False)
            await stack.enter_async_context(http)
            async with asyncio.timeout(CONNECT_S):
                tools, *servers = await connect_mcp({"mcpServers": places}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                reply = await http.post(f"{endpoint}/chat/completions", json=body)
                if (spent := self._model.spent) and trace.num_turns:  # the episode is scored
                    if spent.finish_reason in SPENT:
                        trace.stop(SPENT[spent.finish_reason])
                    else:
                        trace.record_timeout("agent")
                    break
                if reply.status_code != httpx.codes.OK:
                    raise RuntimeError(reply.text)
                messages.append(reply.json()["choices"][0]["message"])
                if not (calls := messages[-1].get("tool_calls")):
                    break
                for call in calls:
                    result = await _result(http, tool_interception_url, call, *servers)
                    messages.append(bound_tool_message(result))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _opening(system: str | None, prompt: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    """The first messages, in OpenAI's form."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or ())]


async def _result(
    http: httpx.AsyncClient,
    interceptors: str | None,
    call: Mapping[str, Any],
    dispatch: Mapping[str, Any],
    servers: Mapping[str, Any],
) -> Any:
    """The message with the result of a call, or that which the task's interceptors give instead.

    A mistake of the model is an observation. Raises RuntimeError if the interceptors stop the episode.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    with contextlib.suppress(ValueError):  # a text that is not JSON stays a text
        arguments = json.loads(arguments or "{}")
    if interceptors is not None:
        asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
        reply = await http.post(interceptors, json=asked)
        if reply.status_code != httpx.codes.OK or (decision := reply.json())["action"] == "stop":
            raise RuntimeError(reply.text)
        if decision["action"] == "deny" and decision["message"]:
            return decision["message"]
    if name not in dispatch:
        content: Any = f"error: there is no tool {name}; the tools are {', '.join(dispatch) or 'none'}"
    elif not isinstance(arguments, dict):
        content = f"error: the arguments of {name} are not a JSON object"
    else:
        content = await call_mcp(servers, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _read(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form with its text in one piece. Raises ValueError for images and the like."""
    parts = message.get("content") or ""
    if not isinstance(parts, str):
        if other := sorted({part["type"] for part in parts} - {"text"}):
            raise ValueError(f"found a message with {', '.join(other)}; the model reads text only")
        parts = "".join(part["text"] for part in parts)
    return {**{key: value for key, value in message.items() if value is not None}, "content": parts}
