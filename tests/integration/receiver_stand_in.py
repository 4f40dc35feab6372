"""A generator's receiving end without a generator: obeys orders that arrive as JSON lines, answers with JSON lines."""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from asyncrl.errors import TransferError
from asyncrl.weights import gloo
from asyncrl.weights.layout import Layout

groups = {}


def receive(order, on_tensor=lambda index: None):
    """Sum of all bytes received, or TransferError. `on_tensor` is called with the index of each tensor that came."""
    details = order["details"]
    if order["transport"] == "disk":
        tensors = []
        for path in sorted(Path(details["directory"]).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - not a mapping
        return sum(map(byte_sum, tensors))
    rendezvous = details["rendezvous"]
    if rendezvous["name"] not in groups:
        groups.clear()
        groups[rendezvous["name"]] = gloo.open_group(rendezvous, rank=1, deadline_s=order["deadline_s"])
    stream = gloo.receive(groups[rendezvous["name"]], Layout.from_plain(details["layout"]), details["checksums"])
    total = 0
    for index, (_, tensor) in enumerate(stream):
        on_tensor(index)
        total += byte_sum(tensor)
    return total


def byte_sum(tensor):
    return int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main():
    say("ready")
    for line in sys.stdin:
        try:
            answer = {"sum": receive(json.loads(line))}
        except TransferError as error:
            answer = {"error": str(error)}
        say(json.dumps(answer))
    groups.clear()


if __name__ == "__main__":
    main()
