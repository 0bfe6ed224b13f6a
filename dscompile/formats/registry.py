"""`FORMATS`: every known row and page layout by name. Adding one is adding a record (docs/formats.md)."""

from dataclasses import replace

from dscompile.formats.pages import PageLayout
from dscompile.formats.record import KVFormat

# Rows of DeepSeek-V4.1's release; the amax floors are its own. fastllm stores the same rows one after the other.
WINDOW = KVFormat("fp8_g32_ue8m0", "e4m3", 32, "ue8m0", amax_floor=1e-4)  # 512 -> 528 bytes
COMPRESSED = KVFormat("fp4_g16_e4m3", "e2m1", 16, "e4m3", amax_floor=6 * 2.0**-9)  # 512 -> 288 bytes
INDEX = KVFormat("fp4_g32_ue8m0", "e2m1", 32, "ue8m0", amax_floor=6 * 2.0**-126)  # 128 -> 68 bytes

# Index keys in FP8 with one float32 scale per row of 128: 128 -> 132 bytes. Writers differ in whether the scale is
# rounded up to a power of two; readers do not care.
INDEX_FP8 = KVFormat("fp8_g128_fp32", "e4m3", 128, "fp32", amax_floor=1e-4)
INDEX_FP8_POW2 = replace(INDEX_FP8, name="fp8_g128_fp32_pow2", pow2=True)

# DeepSeek-V4's row: 448 values in FP8, the 64 of the rotary embedding in bf16, 7 scales and a zero byte. 512 -> 584.
V4_ROW = KVFormat("fp8_g64_ue8m0_tail64", "e4m3", 64, "ue8m0", amax_floor=1e-4, tail=64, pad_bytes=1)


def _paged(name: str, row: KVFormat, align_bytes: int, rows: int = 0) -> KVFormat:
    """`row` in pages that hold all payloads first, then all scales; rows 0 = the engine's choice."""
    return replace(row, name=name, page=PageLayout("segregated", rows, align_bytes))


RECORDS = (
    KVFormat("bf16", "bf16"),
    KVFormat("fp16", "fp16"),
    KVFormat("fp32", "fp32"),
    WINDOW,
    COMPRESSED,
    INDEX,
    INDEX_FP8,
    INDEX_FP8_POW2,
    V4_ROW,
    # FlashMLA and, with 64 or 128 rows to a page, SGLang.
    _paged("flashmla_v4", V4_ROW, 576),
    _paged("flashmla_v41", WINDOW, 512),
    _paged("flashmla_v41_fp4", COMPRESSED, 256),
    # vLLM on SM100 (every page aligned to 512 bytes) and on SM90.
    _paged("vllm_sm100_window", WINDOW, 512, rows=32),
    _paged("vllm_sm100_fp8", WINDOW, 512, rows=128),
    _paged("vllm_sm100_fp4", COMPRESSED, 512, rows=128),
    _paged("vllm_sm100_index_fp4", INDEX, 512, rows=128),
    _paged("vllm_sm100_index_fp8", INDEX_FP8, 512, rows=128),
    _paged("vllm_sm90", V4_ROW, 576, rows=64),
    # Pages of index keys as DeepGEMM's logits kernels read them.
    _paged("deepgemm_index_fp4", INDEX, 512),
    _paged("deepgemm_index_fp8", INDEX_FP8, 512),
)


class Registry(dict[str, KVFormat]):
    """Records by name; an unknown name raises a KeyError that lists the known ones."""

    def __missing__(self, name: str) -> KVFormat:
        raise KeyError(f"format {name!r}, allowed: {sorted(self)}")


FORMATS: dict[str, KVFormat] = Registry({record.name: record for record in RECORDS})
