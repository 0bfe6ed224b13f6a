"""The machines that code is generated for, as data: one frozen record each, every constant with its origin.

Nothing else in the project asks which GPU it is. A value that nobody has confirmed says so in its `status`, and a value
that is not a property of the target (a CPU's memory bandwidth) is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Status = Literal["datasheet", "unconfirmed", "unknown"]

GB = 10**9
TB_PER_S = 10**12
PFLOP_PER_S = 10**15
KIB = 2**10
MB = 10**6


class UnsupportedTargetError(ValueError):
    """A device that no target describes, or a target name that does not exist."""


@dataclass(frozen=True)
class Constant:
    """A hardware constant in the unit that its field's name states; None if unknown.

    status: "datasheet" (read in the vendor's document), "unconfirmed" (believed, not looked up) or "unknown".
    """

    value: float | None
    status: Status
    source: str


UNKNOWN = Constant(None, "unknown", "differs between machines")
ABSENT = Constant(0, "datasheet", "the architecture has none")


FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "tma": "asynchronous copies of tiles by descriptor",
        "wgmma": "warp-group matrix products, operands in shared memory (HGMMA)",
        "tcgen05": "fifth-generation tensor cores with tensor memory (UTCHMMA and its kin)",
        "block_scaled_mma": "products of FP8 and FP4 with block scales in the tensor core",
        "e2m1_cvt": "conversion between fp32 and E2M1 in one instruction",
        "pdl": "a kernel may start before the one before it has ended",
    }
)
_HOPPER = frozenset(("tma", "wgmma", "pdl"))
_BLACKWELL = frozenset(("tma", "tcgen05", "block_scaled_mma", "e2m1_cvt", "pdl"))


@dataclass(frozen=True)
class Target:
    """One machine.

    flops_per_s: dense peak by operand type (2 FLOP per multiply-add); a type that is missing has no matrix unit.
    "fp4" is FP4 x FP4: FP8 activations times FP4 weights run at the "fp8" rate.
    link_bytes_per_s: one direction, from one device to all others of its domain of `link_domain_devices`.
    smem_bytes_per_block: what one kernel may ask for. features: of `FEATURES`, what variants of kernels depend on.
    """

    name: str
    product: str
    device_type: str
    capability: tuple[int, int] | None
    hbm_bytes: Constant = UNKNOWN
    hbm_bytes_per_s: Constant = UNKNOWN
    flops_per_s: Mapping[str, Constant] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    sm_count: Constant = UNKNOWN
    smem_bytes_per_sm: Constant = UNKNOWN
    smem_bytes_per_block: int = 0
    features: frozenset[str] = frozenset()
    tmem_bytes_per_sm: Constant = UNKNOWN
    l2_bytes: Constant = UNKNOWN
    link_bytes_per_s: Constant = UNKNOWN
    link_domain_devices: Constant = UNKNOWN

    def has(self, feature: str) -> bool:
        """Whether the machine has `feature`, one of `FEATURES`; ValueError for any other name."""
        if feature not in FEATURES:
            raise ValueError(f"unknown feature {feature!r}; allowed: {', '.join(FEATURES)}")
        return feature in self.features

    def constants(self) -> dict[str, Constant]:
        """Every constant by name, with one `flops_per_s.<type>` entry per operand type."""
        names = ("hbm_bytes", "hbm_bytes_per_s", "sm_count", "smem_bytes_per_sm", "tmem_bytes_per_sm", "l2_bytes")
        rows = {name: getattr(self, name) for name in (*names, "link_bytes_per_s", "link_domain_devices")}
        rows.update({f"flops_per_s.{kind}": constant for kind, constant in self.flops_per_s.items()})
        return rows

    def floor_us(
        self, hbm_bytes: float = 0, flops: float = 0, operand: str = "bf16", link_bytes: float = 0
    ) -> float | None:
        """The least time in microseconds for that much traffic and arithmetic, all overlapped (the roofline).

        None if a constant that it needs is unknown, `operand` included. A lower bound at peak rates, not a prediction.
        """
        demands = (
            (hbm_bytes, self.hbm_bytes_per_s),
            (flops, self.flops_per_s.get(operand, UNKNOWN)),
            (link_bytes, self.link_bytes_per_s),
        )
        seconds = 0.0
        for amount, rate in demands:
            if not amount:
                continue
            if not rate.value:
                return None
            seconds = max(seconds, amount / rate.value)
        return seconds * 1e6


def _unconfirmed(product: str, value: float) -> Constant:
    return Constant(value, "unconfirmed", f"{product} data sheet, from memory")


def _gpu(
    name: str,
    product: str,
    capability: tuple[int, int],
    *,
    hbm_bytes: float,
    hbm_bytes_per_s: float,
    flops_per_s: dict[str, float],
    sm_count: int,
    tmem_bytes_per_sm: int,
    l2_bytes: float,
    link_bytes_per_s: float,
    link_domain_devices: int,
) -> Target:
    def of(value: float) -> Constant:
        return _unconfirmed(product, value)

    return Target(
        name=name,
        product=product,
        device_type="cuda",
        capability=capability,
        hbm_bytes=of(hbm_bytes),
        hbm_bytes_per_s=of(hbm_bytes_per_s),
        flops_per_s=MappingProxyType({kind: of(value) for kind, value in flops_per_s.items()}),
        sm_count=of(sm_count),
        smem_bytes_per_sm=of(228 * KIB),
        smem_bytes_per_block=227 * KIB,
        features=_BLACKWELL if capability >= (10, 0) else _HOPPER,
        tmem_bytes_per_sm=of(tmem_bytes_per_sm) if tmem_bytes_per_sm else ABSENT,
        l2_bytes=of(l2_bytes),
        link_bytes_per_s=of(link_bytes_per_s),
        link_domain_devices=of(link_domain_devices),
    )


# The vendor states NVLink with both directions added up; the records hold one direction.
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target(
                name="cpu",
                product="the host's CPU",
                device_type="cpu",
                capability=None,
                flops_per_s=MappingProxyType({"bf16": UNKNOWN}),
            ),
            _gpu(
                "sm_90a",
                "H200",
                (9, 0),
                hbm_bytes=141 * GB,
                hbm_bytes_per_s=4.8 * TB_PER_S,
                flops_per_s={"bf16": 0.99 * PFLOP_PER_S, "fp8": 1.98 * PFLOP_PER_S},
                sm_count=132,
                tmem_bytes_per_sm=0,
                l2_bytes=50 * MB,
                link_bytes_per_s=0.45 * TB_PER_S,
                link_domain_devices=8,
            ),
            _gpu(
                "sm_100a",
                "B200",
                (10, 0),
                hbm_bytes=192 * GB,
                hbm_bytes_per_s=8 * TB_PER_S,
                flops_per_s={"bf16": 2.25 * PFLOP_PER_S, "fp8": 4.5 * PFLOP_PER_S, "fp4": 9 * PFLOP_PER_S},
                sm_count=148,
                tmem_bytes_per_sm=256 * KIB,
                l2_bytes=126 * MB,
                link_bytes_per_s=0.9 * TB_PER_S,
                link_domain_devices=72,
            ),
            _gpu(
                "sm_103a",
                "GB300",
                (10, 3),
                hbm_bytes=288 * GB,
                hbm_bytes_per_s=8 * TB_PER_S,
                flops_per_s={"bf16": 2.5 * PFLOP_PER_S, "fp8": 5 * PFLOP_PER_S, "fp4": 15 * PFLOP_PER_S},
                sm_count=152,
                tmem_bytes_per_sm=256 * KIB,
                l2_bytes=126 * MB,
                link_bytes_per_s=0.9 * TB_PER_S,
                link_domain_devices=72,
            ),
        )
    }
)


def get_target(name: str) -> Target:
    """The target of that name; `UnsupportedTargetError` lists the names there are."""
    if name not in TARGETS:
        raise UnsupportedTargetError(f"unknown target {name!r}; allowed: {', '.join(TARGETS)}")
    return TARGETS[name]


def detect_target(device: torch.device | str | None = None) -> Target:
    """The target that `device` is; None means the current CUDA device if there is one, else the CPU.

    Raises `UnsupportedTargetError` for a device type or compute capability that no target describes.
    """
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        return TARGETS["cpu"]
    hint = f"choose one with options={{'target': ...}}: {', '.join(TARGETS)}"
    if device.type != "cuda":
        raise UnsupportedTargetError(f"no target describes device {str(device)!r}; {hint}")
    if not torch.cuda.is_available():
        raise UnsupportedTargetError(f"cannot ask device {str(device)!r}: this process sees no CUDA device; {hint}")
    capability = torch.cuda.get_device_capability(device)
    for target in TARGETS.values():
        if target.capability == capability:
            return target
    name = torch.cuda.get_device_name(device)
    raise UnsupportedTargetError(
        f"no target describes {name} (compute capability {capability[0]}.{capability[1]}); {hint}"
    )
