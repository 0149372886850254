"""Describes a GPU as far as the choice of kernels and tilings depends on it. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of shared memory that one block may use, by compute capability, for a torch that does not report it.
SHARED_MEMORY = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
}
LEAST_SHARED_MEMORY = 48 << 10  # every GPU has this much


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Holds the properties of a GPU that kernels depend on."""

    name: str
    capability: tuple[int, int]  # CUDA compute capability
    sm_count: int  # streaming multiprocessors
    shared_memory: int  # bytes that one block may use
    l2_bytes: int
    bandwidth: float = 0.0  # bytes per second of the memory; 0: unknown

    @property
    def has_fp8(self) -> bool:
        """Returns whether the tensor cores multiply FP8 and kernels can convert it."""
        return self.capability >= (8, 9)

    @property
    def has_hopper_gemm(self) -> bool:
        """Returns whether kernels/hopper_gemm.py runs: WGMMA exists only on compute capability 9.0."""
        return self.capability == (9, 0)

    @property
    def has_hopper_attention(self) -> bool:
        """Returns whether kernels/hopper_attention.py runs: it needs WGMMA too."""
        return self.has_hopper_gemm

    @property
    def is_tuned(self) -> bool:
        """Returns whether the tilings of the source code were measured on this architecture (an H200)."""
        return self.capability == (9, 0)

    def stages_that_fit(self, stages: int, stage_bytes: int, fixed_bytes: int = 0) -> int:
        """Returns how many of the wanted pipeline stages fit into shared memory with `fixed_bytes`; at least one."""
        return max(min(stages, (self.shared_memory - fixed_bytes) // stage_bytes), 1)


# Triton's interpreter has the tilings of an H200 without its features.
INTERPRETER = DeviceProperties("the interpreter", (8, 9), 132, 227 << 10, 50 << 20)
