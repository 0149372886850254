"""What kernels call: `gl`, `mbarrier`, `tma`, products, and the lines of PTX that they contain."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia import hopper
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tests.cuda.gluon import memory, registers
from tests.cuda.gluon.faults import KernelFault
from tests.cuda.gluon.machine import Barrier, Machine
from tests.cuda.gluon.registers import Tensor, wrapped
from tests.cuda.gluon.shared import Shared

DTYPES = (*registers.TORCH, real.pointer_type)
LAYOUTS = (
    real.BlockedLayout,
    real.SliceLayout,
    real.DotOperandLayout,
    real.NVMMADistributedLayout,
    real.NVMMASharedLayout,
    real.SwizzledSharedLayout,
)


class Descriptor:
    """Says what the copy engine knows of a tensor."""

    def __init__(self, described: Any) -> None:
        self.base, self.block_shape, self.layout = described.base, described.block_shape, described.layout
        self.dtype = registers.TYPES[described.base.dtype]
        if described.padding != "zero" or list(described.base.shape) != list(described.shape):
            raise KernelFault("only descriptors of whole tensors that are padded with zeros are interpreted")


def range_of(*bounds: Any) -> Iterator[Tensor]:
    """Yields the numbers of a loop, which are known when the kernel runs."""
    return (Tensor(i, real.int32) for i in range(*map(int, bounds)))


def packed_pairs(kind: torch.dtype) -> Callable[..., Tensor]:
    """Returns what rounds two floats to 16 bits and puts the first into the lower half of a word."""

    def pack(low: Tensor, high: Tensor) -> Tensor:
        halves = [half.data.to(kind).view(torch.int16) for half in (low, high)]
        return Tensor(torch.stack(halves, -1).view(torch.int32).squeeze(-1), real.int32, low.layout)

    return pack


def unpacked_pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lower and the upper halves of words."""
    halves = words.data.contiguous().view(torch.int16).view(*words.shape, 2)
    return Tensor(halves[..., 0], real.int16, words.layout), Tensor(halves[..., 1], real.int16, words.layout)


class Language:
    """Has what kernels call, for one program at a time."""

    machine: Machine

    def __init__(self) -> None:
        self.assembly: dict[str, Callable[..., Any]] = {
            "cvt.rn.bf16x2.f32 $0, $2, $1;": packed_pairs(torch.bfloat16),
            "cvt.rn.f16x2.f32 $0, $2, $1;": packed_pairs(torch.float16),
            "mov.b32 {$0, $1}, $2;": unpacked_pairs,
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }": (
                lambda address, size: None
            ),
        }
        for number in (14, 15):
            for word, stay in (("sync", True), ("arrive", False)):
                self.assembly[f"bar.{word} {number}, 256; mov.u32 $0, $1;"] = lambda _, number=number, stay=stay: (
                    self.machine.join_named(number, 256, stay)
                )

    def inline_asm(self, text: str, constraints: str, args: Sequence[Any], *_: Any, **options: Any) -> Any:
        if text not in self.assembly:
            raise KernelFault(f"no Python stands for this PTX: {text}")
        return self.assembly[text](*args)

    # -- shared memory, barriers and copies ---------------------------------------------------------------------------

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any, value: Tensor | None = None) -> Shared:
        """Allocates shared memory that is called what the kernel calls it."""
        frame = sys._getframe(1)
        name = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition(" =")[0].strip()
        return self.machine.allocate(name, dtype, list(shape), layout, value)

    def _barrier(self, at: Shared) -> Barrier:
        return self.machine.barrier(at)

    def expect(self, barrier: Shared, bytes: int, pred: Any = True) -> None:
        if pred:
            self.machine.arrive(self._barrier(barrier), bytes=int(bytes))

    def arrive(self, barrier: Shared, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            self.machine.arrive(self._barrier(barrier), count)

    def wait(self, barrier: Shared, phase: Any, pred: Any = True) -> None:
        if pred:
            self.machine.wait(self._barrier(barrier), int(phase))

    def copy(self, source: Descriptor, place: Sequence[Any], barrier: Shared, to: Shared, pred: Any = True) -> None:
        if pred:
            self.machine.begin_copy(source, [int(at) for at in place], self._barrier(barrier), to)

    def fence(self) -> None:
        for allocation in self.machine.allocations:
            allocation.unfenced &= ~(1 << self.machine.running.agent)

    # -- global memory ------------------------------------------------------------------------------------------------

    def wait_for_previous(self) -> None:
        self.machine.has_waited = True

    def store(self, pointer: Tensor, value: Any, mask: Any = None) -> None:
        self._check_waited()
        memory.store(pointer, value, mask)

    def atomic_add(self, pointer: Tensor, value: Any, sem: str = "") -> Tensor:
        self._check_waited()
        return memory.atomic_add(pointer, value)

    def _check_waited(self) -> None:
        if not self.machine.has_waited:
            raise KernelFault("the program writes to global memory before it has waited for the kernel before it")

    # -- products -----------------------------------------------------------------------------------------------------

    def warpgroup_mma(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        if a.shape[1] != b.shape[0] or a.dtype != b.dtype:
            raise KernelFault(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape}")
        found = self.machine.begin_product(a, b, acc if use_acc else None)
        return found if is_async else self.machine.wait_for_products(0, [found, a])[0]

    def warpgroup_mma_wait(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        found = self.machine.wait_for_products(num_outstanding, list(deps))
        return found[0] if len(found) == 1 else tuple(found)

    def mma_v2(self, a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
        return Tensor(a.data.float() @ b.data.float() + acc.data, real.float32, acc.layout)

    # -- programs -----------------------------------------------------------------------------------------------------

    def program_id(self, axis: int) -> Tensor:
        return Tensor(self.machine.program[axis], real.int32)

    def specialize(self, functions: Any, worker_num_warps: Sequence[int], worker_num_regs: Sequence[int]) -> None:
        if len(worker_num_warps) != len(worker_num_regs):
            raise KernelFault("every partition but the first needs its warps and its registers")
        self.machine.specialize(functions, list(worker_num_warps))

    def names(self) -> dict[int, Any]:
        """Returns what stands for each thing of Triton that kernels name, by its id."""
        gl = SimpleNamespace(
            **{name: value for name, value in vars(real).items() if value in DTYPES or value in LAYOUTS},
            allocate_shared_memory=self.allocate,
            arange=registers.arange,
            atomic_add=self.atomic_add,
            cdiv=lambda a, b: (wrapped(a) + (b - 1)) // b,
            convert_layout=registers.convert_layout,
            exp=registers.exp,
            exp2=registers.exp2,
            full=registers.full,
            inline_asm_elementwise=self.inline_asm,
            join=registers.join,
            load=memory.load,
            max=registers.max_along,
            maximum=registers.maximum,
            minimum=registers.minimum,
            multiple_of=lambda value, _: value,
            program_id=self.program_id,
            reduce=registers.reduce,
            reshape=registers.reshape,
            split=registers.split,
            static_range=range,
            store=self.store,
            sum=registers.sum_along,
            thread_barrier=lambda: None,
            warp_specialize=self.specialize,
            where=registers.where,
            zeros=registers.zeros,
            zeros_like=registers.zeros_like,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=hopper.mbarrier.MBarrierLayout,
            init=lambda at, count: self.machine.init_barrier(at, count),
            expect=self.expect,
            arrive=self.arrive,
            wait=self.wait,
        )
        found = [
            (real, gl),
            (hopper.mbarrier, mbarrier),
            (hopper.tma, SimpleNamespace(async_copy_global_to_shared=self.copy)),
            (hopper.fence_async_shared, self.fence),
            (hopper.warpgroup_mma, self.warpgroup_mma),
            (hopper.warpgroup_mma_wait, self.warpgroup_mma_wait),
            (hopper.mma_v2, self.mma_v2),
            (gdc_wait, self.wait_for_previous),
            (gdc_launch_dependents, lambda: None),
        ]
        return {id(theirs): ours for theirs, ours in found}
