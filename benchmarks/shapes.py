"""The shapes of attention that benchmarks measure: those on which peers were measured."""

import dataclasses

HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class Decode:
    """One query token a sequence."""

    batch: int
    num_heads: int
    num_kv_heads: int
    context: int
    fa3_us: float  # FlashAttention-3, page size 64, one H200
    page_size: int = 64
    flashinfer: bool = True  # it was measured with this shape

    @property
    def name(self) -> str:
        return f"paged_decode_{self.batch}x{self.context}_{self.num_heads}/{self.num_kv_heads}_page{self.page_size}"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """One chunk at the end of a context."""

    chunk: int
    context: int
    fa3_tflops: float  # FlashAttention-3, one H200; the two whole prompts on contiguous keys and values
    num_heads: int = 32
    num_kv_heads: int = 8
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"paged_prefill_{self.chunk}_of_{self.context}"


DECODE = (
    Decode(64, 32, 8, 2048, 137),
    Decode(64, 32, 8, 8192, 484),
    Decode(256, 32, 8, 1024, 279),
    Decode(1, 32, 8, 131_072, 141),
    Decode(8, 32, 8, 32_768, 254),
    Decode(64, 32, 4, 4096, 136),
    Decode(16, 64, 8, 16_384, 254, flashinfer=False),
)
PREFILL = (
    Prefill(4096, 4096, 550),
    Prefill(16_384, 16_384, 721),
    Prefill(512, 16_384, 516),
    Prefill(2048, 32_768, 585),
)
