"""A taskset of verifiers: sums, with a tool that keeps a state. A test copies it into a Python of its own."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    a: int
    b: int


class Counted(vf.State):
    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Counted]):
    TOOL_PREFIX = None

    async def setup_task(self, task: SumData) -> None:
        self.task = task

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.calls += 1
        return f"{a + b}, and the task is {self.task.a} + {self.task.b}"


class SumTaskConfig(vf.TaskConfig):
    with_tools: bool = False
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, Counted, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)] if config.with_tools else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.a < 0:
            raise OSError("no table")

    @vf.stop
    async def asked_to_stop(self, trace: vf.Trace) -> bool:
        return bool(trace.assistant_messages) and "stop" in trace.last_reply

    @vf.intercept
    async def forbid_big_numbers(self, request: vf.Request, trace: vf.Trace) -> vf.Request:
        last = request.messages[-1]
        calls = [call for message in trace.assistant_messages for call in message.tool_calls or []]
        if isinstance(last, vf.ToolMessage) and calls and "1000" in calls[-1].arguments:
            last.content = "too big"
        return request

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "boom":
            raise ValueError(trace.last_reply)
        return float(trace.last_reply == str(self.data.a + self.data.b))

    @vf.reward(weight=-0.5)
    async def long(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 2)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return trace.state.calls


class SumsConfig(vf.TasksetConfig):
    count: int = 10
    task: SumTaskConfig = SumTaskConfig()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(self.config.count):
            data = SumData(prompt=f"{a} + 5?", system_prompt="Answer with a number.", a=a, b=5)
            yield SumTask(data, self.config.task)


if __name__ == "__main__":
    Calculator.run()
