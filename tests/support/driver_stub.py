"""A driver that says that a GPU is there, so that Triton's own way of starting a kernel runs up to the launch."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Utilities:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 152, "warpSize": 32,
            "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0,
        }  # fmt: skip

    def load_binary(self, *args: Any) -> Any:
        raise RuntimeError("there is no GPU")


class Stub:
    """Of the CUDA driver, what is asked before a launch."""

    launcher_cls = None

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability, self.utils = capability, Utilities()

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self.capability

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def install(capability: tuple[int, int]) -> None:
    """For the rest of the process."""
    driver.set_active(Stub(capability))
