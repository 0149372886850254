"""Makes kernels and graphs ready before steps need them: when a model is loaded, and in idle moments."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from penstock.backend.batches import greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.gpu import Gpu
from penstock.backend.cuda.graphs import common_shapes, draft_shapes, of_each_kind
from penstock.backend.cuda.inputs import Shape
from penstock.backend.cuda.loaded_program import LoadedProgram
from penstock.backend.cuda.precompile import Compiler
from penstock.backend.cuda.programs import Programs
from penstock.backend.cuda.steps import Steps
from penstock.backend.cuda.transfer import Transfer

FIRST_SHAPES = (Shape(128, 1, 0, 0, 1), Shape(1, 1, 1, 1, 0))  # a prompt, then an answer


class Preparation:
    """Rehearses the shapes that steps of `step_sizes` (rows, tokens, prefill budget) have."""

    def __init__(self, gpu: Gpu, programs: Programs, steps: Steps, step_sizes: tuple[int, int, int]) -> None:
        self._gpu = gpu
        self._programs = programs
        self._steps = steps
        self._step_sizes = step_sizes
        self._work = self._prepare_shapes()

    def warm_up(self, transfer: Transfer) -> None:
        """Compiles kernels for answers while weights are still on their way, and waits for both. The kernels of a first
        answer run once too."""
        if self._gpu.stream is None:
            return
        with self._gpu.on_device(), closing(Compiler()) as compiler:
            with compiler.watching():
                self._rehearse_first()
                for program, shape in self.of_each_kind():
                    self.rehearse(program, shape)
            transfer.close()
            compiler.done()
        self._rehearse_first()
        self._gpu.synchronize()

    def advance(self) -> bool:
        """Makes one more of the common shapes ready, kernels first, then graphs; returns False if none is left."""
        with self._gpu.on_device():
            return next(self._work, False)

    def restart(self) -> None:
        """Begins again: the KV cache has moved, and graphs are gone."""
        self._work = self._prepare_shapes()

    def close(self) -> None:
        self._work.close()

    def capture(self, program: LoadedProgram, shape: Shape) -> None:
        shape = self._steps.shape_for(program, shape)
        for _ in range(2):
            self.rehearse(program, shape, graph=True)

    def _prepare_shapes(self) -> Generator[bool, None, None]:
        if not self._steps.capture:
            return
        work = self.shapes_ahead()
        with closing(Compiler()) as compiler:
            for program, shape in work:
                with compiler.watching():
                    self.rehearse(program, shape)
                yield True
            while not compiler.done(0.005):
                yield True
        for program, shape in [*work, *work]:  # once without a graph, to capture no loading of kernels
            if not program.graphs.has(shape):
                self.rehearse(program, shape, graph=True)
                yield True

    def of_each_kind(self) -> list[tuple[LoadedProgram, Shape]]:
        ahead = self.shapes_ahead()
        return [
            (program, shape)
            for program in self._programs.values()
            for shape in of_each_kind([shape for each, shape in ahead if each is program])
        ]

    def shapes_ahead(self) -> list[tuple[LoadedProgram, Shape]]:
        steps = self._steps
        common = (
            (program, shape)
            for number, program in self._programs.items()
            for shape in (draft_shapes if number else common_shapes)(*self._step_sizes, *program.program.split_sizes)
            if steps.fits(shape) and shape == steps.pad(program, shape) and (program.sharing or not shape.shared)
        )
        return list(dict.fromkeys((program, steps.shape_for(program, shape)) for program, shape in common))

    def _rehearse_first(self, shapes: Sequence[Shape] = FIRST_SHAPES) -> None:
        for program in self._programs.values():
            for shape in shapes:
                self.rehearse(program, self._steps.shape_for(program, shape), sampling=True)

    def rehearse(self, program: LoadedProgram, shape: Shape, *, graph: bool = False, sampling: bool = False) -> None:
        nothing = replace(greedy_batch([]), tables=np.zeros((program.groups, 0, 0), np.int32))
        work = inputs.plan_attention(nothing, program.tile_tokens, lambda _: shape)
        with self._gpu.on_stream():
            program.rehearse(shape, self._steps.send(program, nothing, work), graph=graph, sampling=sampling)
