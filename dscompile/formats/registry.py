"""`FORMATS`: every known row and page layout by name. Adding one is adding a record."""

from dscompile.formats.pages import PageLayout
from dscompile.formats.record import KVFormat

_E2M1_E4M3_FLOOR = 6 * 2.0**-9  # so that an all-zero group has the smallest E4M3 number as its scale
_E2M1_UE8M0_FLOOR = 6 * 2.0**-126  # so that the scale is a normal float32

FP8_G32_UE8M0 = KVFormat("fp8_g32_ue8m0", "e4m3", 32, "ue8m0", amax_floor=1e-4)
FP4_G16_E4M3 = KVFormat("fp4_g16_e4m3", "e2m1", 16, "e4m3", amax_floor=_E2M1_E4M3_FLOOR)
FP4_G32_UE8M0 = KVFormat("fp4_g32_ue8m0", "e2m1", 32, "ue8m0", amax_floor=_E2M1_UE8M0_FLOOR)

_RECORDS = (
    KVFormat("bf16", "bf16"),
    KVFormat("fp16", "fp16"),
    KVFormat("fp32", "fp32"),
    FP8_G32_UE8M0,
    FP4_G16_E4M3,
    FP4_G32_UE8M0,
)


class Registry(dict[str, KVFormat]):
    """Records by name; an unknown name raises a KeyError that lists the known ones."""

    def __missing__(self, name: str) -> KVFormat:
        raise KeyError(f"format {name!r}, allowed: {sorted(self)}")


FORMATS: dict[str, KVFormat] = Registry({record.name: record for record in _RECORDS})
