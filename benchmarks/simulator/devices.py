"""Peaks of devices, and the shares of them that operators reach: known devices by name, others from a file.

Peaks are data sheets' dense figures (no structured sparsity). `Attained` turns the ideal roofline into one that was
fitted to measurements; its defaults are the ideal. `probe_device` measures a device.
"""

from __future__ import annotations

from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from medusa_decoding.files import read_json, write_json

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


Share = Annotated[float, Field(gt=0, le=1)]
Peak = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=STRICT)
class Attained:
    """The shares of a device's peaks that operators of one kind reach.

    Attributes:
        bandwidth: share of the bandwidth, above 0 and at most 1.
        compute: share of the arithmetic peak, above 0 and at most 1.
        fixed_us: microseconds added to each operator, whatever its size.
        tile: number of rows that are computed together; rows are rounded up to a multiple of it.

    Raises:
        ValueError: a value outside of these.
    """

    bandwidth: Share = 1.0
    compute: Share = 1.0
    fixed_us: Time = 0.0
    tile: Annotated[int, Field(ge=1, strict=True)] = 1


@dataclass(frozen=True, config=STRICT)
class Device:
    """A device's peaks.

    Attributes:
        name: how figures name it.
        flops: peak operations per second in `dtype`; a multiply-add counts as two.
        bandwidth: peak bytes per second of its memory.
        dtype: of the weights and activations that `flops` is for: float32, bfloat16 or float16.
        linear: what projections reach.
        attention: what attention reaches.
        l2_bandwidth: bytes per second between the L2 and the multiprocessors; None: not known.
        launch_us: microseconds of a launch within a captured step that neither its bytes nor its operations explain.
        source: where the figures come from.

    The simulation uses neither `l2_bandwidth` nor `launch_us`; `python -m benchmarks.explain` does.

    Raises:
        ValueError: a peak that is no number above 0, a time below 0, another dtype.
    """

    name: str
    flops: Peak
    bandwidth: Peak
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    linear: Attained = field(default_factory=Attained)
    attention: Attained = field(default_factory=Attained)
    source: str = ""
    l2_bandwidth: Peak | None = None
    launch_us: Time = 0.0

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of `dtype`."""
        return ELEMENT_BYTES[self.dtype]

    def ideal(self) -> Device:
        """Return the device with its peaks reached in full."""
        return replace(self, linear=Attained(), attention=Attained())


A100 = Device(
    "a100-80",
    312e12,
    1935e9,
    source="data sheet, PCIe; figure 9 of the paper; L2: architecture whitepaper, 5,120 bytes per clock at 1.41 GHz",
    l2_bandwidth=5120 * 1.41e9,
)
_HOPPER_L2 = 75e9
"""Bytes per second and multiprocessor, an estimate: with it, the L2 explains what 64 rows cost this project's
projections on an H200."""
_ESTIMATE = "L2: estimate, 75 KB per microsecond and multiprocessor"
H200 = Device(
    "h200",
    989.4e12,
    4.8e12,
    source=f"data sheet, SXM; {_ESTIMATE}, of which there are 132",
    l2_bandwidth=132 * _HOPPER_L2,
)
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        A100,
        # By `benchmarks.paper` from tables 6 to 8 of the paper; a test fits again.
        replace(
            A100,
            name="a100-80-attained",
            linear=Attained(bandwidth=0.63, compute=0.71, tile=128),
            attention=Attained(bandwidth=0.77, fixed_us=33.0),
            source="data sheet, PCIe; shares fitted to tables 6 to 8 of the paper; L2 as of a100-80",
        ),
        Device("a40", 149.7e12, 696e9, source="data sheet; figures 12 to 14 of the paper"),
        Device("a6000", 154.8e12, 768e9, source="data sheet; the paper's figures 15 to 17 draw 181 TFLOP/s"),
        replace(H200, name="h100", bandwidth=3.35e12),
        Device(
            "h100-pcie",
            756e12,
            2.0e12,
            source=f"data sheet, PCIe; {_ESTIMATE}, of which there are 114",
            l2_bandwidth=114 * _HOPPER_L2,
        ),
        H200,
        # By `benchmarks.roofline` from plain steps in benchmarks/results/nvidia-h200.jsonl; a test fits again.
        replace(
            H200,
            name="h200-attained",
            linear=Attained(bandwidth=0.84, fixed_us=2.6),
            attention=Attained(bandwidth=0.84, fixed_us=2.6),
            source="data sheet, SXM; share and fixed time fitted to this project's plain steps, whose layers are 5 "
            f"operators in 9 launches; launch: estimate, 5 x 2.6 / 9 microseconds; {_ESTIMATE}",
            launch_us=1.4,
        ),
    )
}


def read_device(path: str | Path) -> Device:
    """Read a device from a JSON file: an object with the attributes of `Device`, `linear` and `attention` optional.

    Raises:
        ValueError: not such a file; it names the file and the attribute.
    """
    try:
        return TypeAdapter(Device).validate_python(read_json(path))
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r:.80}" for one in error.errors())
        raise ValueError(f"{path}: {'; '.join(wrong)}") from error


def write_device(device: Device, path: str | Path) -> None:
    """Write a device for `read_device`; the file appears whole or not at all."""
    write_json(path, asdict(device))
