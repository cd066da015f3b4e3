"""Run compiled GPU kernels without a GPU: an emulator of PTX, with a race detector.

`install()` compiles every launch of a Triton kernel for one target and executes its PTX on CPU tensors. As a pytest
plugin, `pytest -p emulator.plugin --sm 80 --races`, it does so under the project's own tests. See docs/kernels.md.
"""

from emulator.findings import Access, Finding
from emulator.machine import EmulationError, Emulator, Settings
from emulator.project import install

__all__ = ["Access", "EmulationError", "Emulator", "Finding", "Settings", "install"]
