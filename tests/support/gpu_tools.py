"""What nvidia-smi and the kernel say of three GPUs, and programs that say it."""

from pathlib import Path

import pytest

ROWS = """\
0, GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, 00000000:18:00.0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, Disabled, 0, No
1, GPU-5d2a1c77-3f0e-11d2-9a64-0c5b9f2b6d11, 00000000:3B:00.0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 61234, Disabled, 3, Yes
2, GPU-77f0e1aa-0b1c-2d3e-4f50-616263646566, 00000000:86:00.0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, Enabled, 0, No
"""
MATRIX = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tNS\t
 GPU2\tCNS\tNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
LOG = """\
[    4.102938] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.54.15
[86401.223344] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS
[90210.100000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[90211.100000] NVRM: Xid (PCI:0000:86:00): 94, pid=99, name=vllm, Contained: SM (0x1).
"""


def without_tools(monkeypatch: pytest.MonkeyPatch, directory: Path, visible: str = "0") -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", str(directory))


def tool(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
