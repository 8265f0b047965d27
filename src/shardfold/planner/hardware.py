"""What devices and links can do, as their makers print it; and what was measured on a machine.

Rates are dense ones, without sparsity. Memory is what drivers report in all, as PyTorch's messages of memory that is
out print it ("GPU 0 has a total capacity of 39.39 GiB"), which is less than the maker's number. A profile that
``shardfold doctor --measure`` wrote has the same fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.axes import Mesh
from shardfold.plan.checks import described, parse_bytes

__all__ = ["DEVICES", "RESERVE", "Cluster", "Device", "Interconnect", "cluster", "known_device"]

GIB = 1024**3
RESERVE = 0.75 * GIB
"""Bytes that a process's context and libraries take of the memory that a driver reports."""
MATH = 0.6
"""Part of a printed rate that large products reach, where nothing was measured."""
MUCH = 1.5  # times; rates of one dtype are off by less
LAUNCH = 20e-6
"""Seconds that PyTorch takes the host for an operation, views among them, where nothing was measured: beside an H200 it
was 15 to 26 us in steps of six models."""


class Interconnect(NamedTuple):
    """A way between ranks.

    Attributes:
        rate: bytes per second that one rank sends.
        latency: seconds of a message.
    """

    rate: float
    latency: float = 10e-6


NODE, NETWORK = Interconnect(25e9), Interconnect(12.5e9)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device and its links.

    Attributes:
        name: as ``--gpus`` takes it.
        memory: bytes, as the driver reports them in all.
        flops: per second, by dtype; of one that it has not, that of the next wider is taken.
        bandwidth: of its memory, bytes per second.
        near: to the other devices of its node.
        far: to devices of other nodes, for each device.
        host: to host memory, bytes per second.
        disk: bytes per second.
        reached: part of ``flops`` that large products reach.
        launch: seconds that an operation takes the host; a device with streams computes meanwhile.
        reserve: bytes that a process's context and libraries take of ``memory``.
        source: of the figures.
        streams: sends beside the computation.
        attention: what attention reaches between tokens, forward and backward together, per second, by dtype; of one
            that it has not, as products do.
        call: seconds that each product takes besides its operations, by dtype.
        others: bytes per second of operations that are no products, whose results are new; 0: ``bandwidth``.
        operation: seconds of the host for each operation of a program; of a device with streams it runs ahead.
        collective: those of an operation that sends, besides what its link takes and ``operation``.
        meeting: those in which ranks ask each other whether all of them go on, at the ends of passes and at a step.
        update: bytes of states and gradients per second that an optimizer goes through in host memory, on a rank's
            share of the cores; 0: as :data:`~shardfold.planner.seconds.HOST_UPDATE` has it, or of a device that is
            the host ``bandwidth``.
        codecs: seconds of formats by name, as :class:`~shardfold.plan.cost.Codec` has them: for each element
            that is encoded, decoded, decoded and added, and for a call.
        reads: bytes per second that come from the disk, past the page cache; 0: ``disk``.
        forwards: of a process that has all cores, what a forward takes in which texts have one token each, by format
            of weights (``fp32``: none): rows of how many texts, seconds of a block, and of each weight.
        kept: seconds of each byte of keys and values that such a forward reads; 0: ``bandwidth``.
        cut_forwards: as ``forwards``, of each of two processes that share every layer and the cores.
        cut_kept: as ``kept``, of these.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    near: Interconnect = NODE
    far: Interconnect = NETWORK
    host: float = 25e9
    disk: float = 3e9
    reached: float = MATH
    launch: float = LAUNCH
    reserve: float = RESERVE
    source: str = ""
    streams: bool = True
    attention: Mapping[str, float] = field(default_factory=dict[str, float])
    call: Mapping[str, float] = field(default_factory=dict[str, float])
    others: float = 0.0
    operation: float = 0.0
    collective: float = 0.0
    meeting: float = 0.0
    update: float = 0.0
    codecs: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    reads: float = 0.0
    forwards: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict[str, Sequence[Sequence[float]]])
    kept: float = 0.0
    cut_forwards: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict[str, Sequence[Sequence[float]]])
    cut_kept: float = 0.0

    def attending(self, dtype: str) -> float:
        """Floating-point operations per second of attention between tokens of that dtype."""
        return self.attention.get(dtype) or self.rate(dtype) * self.reached

    def rate(self, dtype: str) -> float:
        """Floating-point operations per second of products of that dtype, as printed; without ``fp8``, of its
        emulation in fp32."""
        for name in (dtype, *(() if dtype == "fp8" else ("tf32" if dtype == "fp32" else "fp16",)), "fp32"):
            if name in self.flops and not (dtype == "fp32" and name == "tf32"):
                return self.flops[name]
        return next(iter(self.flops.values()))

    def faster(self, dtype: str) -> tuple[str, float]:
        """The dtype whose products are the fastest, and how many times as fast as those of that dtype; rates are
        measured, so it is that dtype itself unless another is much faster."""
        best = max((dtype, "fp32", "fp16"), key=self.rate)
        times = self.rate(best) / self.rate(dtype)
        return (best, times) if times > MUCH else (dtype, 1.0)

    @property
    def usable(self) -> float:
        """Bytes for a training run."""
        return self.memory - self.reserve

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1)


def _gpu(
    name: str,
    memory: float,
    fp16: float,
    fp32: float,
    bandwidth: float,
    near: float,
    far: float,
    host: float,
    source: str,
    bf16: float | None = None,
    fp8: float | None = None,
    **more: Any,
) -> Device:
    """Rates in TFLOP/s and GB/s, memory in GiB; ``fp8`` where ``torch._scaled_mm`` has e4m3 and e5m2."""
    flops = {"fp16": fp16 * 1e12, "fp32": fp32 * 1e12, "bf16": (fp16 if bf16 is None else bf16) * 1e12}
    if fp8 is not None:
        flops["fp8"] = fp8 * 1e12
    return Device(
        name=name,
        memory=memory * GIB,
        flops=flops,
        bandwidth=bandwidth * 1e9,
        near=Interconnect(near * 1e9),
        far=Interconnect(far * 1e9),
        host=host * 1e9,
        source=source,
        **more,
    )


_A100 = "NVIDIA A100 datasheet (2021): 312 TFLOP/s in 16 bits, 19.5 in fp32, NVLink 300 GB/s each way; 200 Gbit/s a GPU"
_H100 = (
    "NVIDIA H100 datasheet (2023), SXM, dense: 989 TFLOP/s in 16 bits, 1979 in fp8, NVLink 450 GB/s; 400 Gbit/s a GPU"
)
_V100 = "NVIDIA V100 datasheet (2018), SXM2: 125 TFLOP/s in fp16, 15.7 in fp32, NVLink 150 GB/s each way; 100 Gbit/s"

#: Devices that have names.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("A100-40G", 39.39, 312, 19.5, 1555, 300, 25, 25, _A100),
        _gpu("A100-80G", 79.14, 312, 19.5, 2039, 300, 25, 25, _A100),
        _gpu("H100", 79.10, 989, 67, 3350, 450, 50, 50, _H100, fp8=1979),
        _gpu(
            "H200",
            139.7,
            989,
            67,
            4800,
            450,
            50,
            50,
            "NVIDIA H200 datasheet (2024): 141 GB at 4.8 TB/s, rates as the H100's",
            fp8=1979,
        ),
        _gpu("V100-16G", 15.77, 125, 15.7, 900, 150, 12.5, 12, _V100, bf16=15.7),
        _gpu("V100-32G", 31.73, 125, 15.7, 900, 150, 12.5, 12, _V100, bf16=15.7),
        _gpu(
            "2080Ti",
            10.75,
            53.8,
            13.4,
            616,
            12,
            1.25,
            12,
            "NVIDIA Turing whitepaper (2018): fp16 with fp32 sums at half rate; PCIe 3.0 x16; 10 Gbit/s",
            bf16=13.4,
        ),
        _gpu(
            "4090",
            23.63,
            165.2,
            82.6,
            1008,
            25,
            1.25,
            25,
            "NVIDIA Ada whitepaper (2022): fp16 and fp8 with fp32 sums; PCIe 4.0 x16, no NVLink; 10 Gbit/s",
            fp8=330.3,
        ),
        _gpu(
            "L4",
            22.03,
            121,
            30.3,
            300,
            25,
            3.1,
            25,
            "NVIDIA L4 datasheet (2023), dense; PCIe 4.0 x16; 25 Gbit/s",
            fp8=242.5,
        ),
        _gpu(
            "MI300X",
            191.69,
            1307.4,
            163.4,
            5300,
            448,
            50,
            50,
            "AMD Instinct MI300X datasheet (2023), dense; Infinity Fabric 7 x 64 GB/s; 400 Gbit/s a GPU",
        ),
    )
}


PRODUCTS: Mapping[str, str] = {
    r"A100-SXM4-40GB": "A100-40G",
    r"A100-SXM4-80GB": "A100-80G",
    r"H100 80GB HBM3": "H100",
    r"H200": "H200",
    r"V100-SXM2-16GB": "V100-16G",
    r"V100-SXM2-32GB": "V100-32G",
    r"RTX 2080 Ti": "2080Ti",
    r"RTX 4090$": "4090",
    r"NVIDIA L4$": "L4",
    r"MI300X": "MI300X",
}
"""What drivers call the devices of :data:`DEVICES`, as patterns."""


def known_device(product: str) -> Device | None:
    """The profile of a device that its driver calls so; None: there is none."""
    return next((DEVICES[name] for pattern, name in PRODUCTS.items() if re.search(pattern, product)), None)


MOST = 10**6
"""Devices of a cluster."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices that are alike.

    Attributes:
        device: each of them.
        nodes: how many.
        per_node: devices on each.
    """

    device: Device
    nodes: int = 1
    per_node: int = 1

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def mesh(self) -> dict[str, int]:
        """Axes of data over all of them."""
        return {"inter": self.nodes, "intra": self.per_node}

    def link(self, mesh: Mesh, axis: str) -> Interconnect:
        """Between ranks that differ on an axis of a mesh of all of them only: ranks that follow each other are on one
        node."""
        names = list(mesh)
        behind = mesh.parts(names[names.index(axis) + 1 :])
        return self.device.near if behind * mesh[axis] <= self.per_node else self.device.far

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.device.name}"


def cluster(text: str, *, memory: str | None = None) -> Cluster:
    """The cluster that ``"8xA100-40G"``, ``"4x8xH100"`` (nodes first) or ``"2xmy-machine.json"`` names.

    Args:
        text: numbers and a device: one of :data:`DEVICES`, or a file that ``shardfold doctor --measure`` wrote.
        memory: bytes of each device, in place of its own.

    Raises:
        ConfigError: it names none.
    """
    given: tuple[Any, Any] = (text, memory)
    if not isinstance(given[0], str):
        raise ConfigError(f"gpus= is {described(given[0])}: it is text, as '8xA100-40G' or '4x8xH100'.")
    if not isinstance(given[1], str | None):
        raise ConfigError(f"memory= is {described(given[1])}: it is text, as '40GiB'.")
    match = re.fullmatch(r"\s*(?:(-?\d+)\s*[x*]\s*)?(?:(-?\d+)\s*[x*]\s*)?(\S+)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} names no devices: write how many and which, as in '8xA100-40G' or '4x8xH100'.")
    first, second, name = match.groups()
    device = _device(name)
    if memory is not None:
        num_bytes = parse_bytes(memory)
        if num_bytes is None:
            raise ConfigError(f"memory={memory!r} is not a number of bytes above 0: write it as '40GiB' or '80GB'.")
        if memory.strip().isdecimal() and num_bytes < 2**20:
            raise ConfigError(f"memory={memory!r} is as many bytes: write it as '{memory.strip()}GiB'.")
        device = replace(device, memory=float(num_bytes), reserve=0.0)
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    if nodes < 1 or per_node < 1 or nodes * per_node > MOST:
        raise ConfigError(f"{text!r} names no cluster: write 1 device or more, and {MOST:,} at most.")
    return Cluster(device, nodes, per_node)


def host_bytes(given: Any) -> float:
    """Host memory for each rank, as text; None: enough, which is inf.

    Raises:
        ConfigError: it is no number of bytes.
    """
    if given is None:
        return inf
    found = parse_bytes(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"host={described(given)} is not a number of bytes above 0: write it as '64GiB' or '64GB'.")
    return float(found)


def _device(name: str) -> Device:
    if name.endswith(".json"):
        return read_device(Path(name))
    known = {each.lower(): each for each in DEVICES}
    found = known.get(name.lower()) or known.get(name.lower().replace("gb", "g"))
    if found is None:
        sizes = [each for each in DEVICES if each.lower().startswith(f"{name.lower()}-")]
        if sizes:
            raise ConfigError(f"{name!r} is made with more than one memory: write {' or '.join(sizes)}.")
        raise ConfigError(f"there is no device {name!r}.{did_you_mean(name, DEVICES)}")
    return DEVICES[found]


def read_device(path: Path) -> Device:
    """A profile from a file.

    Raises:
        ConfigError: there is none, or it is no profile.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is not a profile of a machine: {error}.") from error
    known = {each.name for each in fields(Device)}
    if not isinstance(given, dict) or not {"name", "memory", "flops", "bandwidth"} <= set(given) <= known:
        raise ConfigError(
            f"{str(path)!r} is not a profile of a machine: it has name, memory, flops and bandwidth, as "
            "`shardfold doctor --measure` writes them."
        )
    for side in ("near", "far"):
        if side in given:
            given[side] = Interconnect(*given[side])
    return Device(**given)
