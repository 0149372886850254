"""Plans steps, sends their numbers to the device and queues their forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from penstock.backend.base import Batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.flight import Sampling
from penstock.backend.cuda.graphs import in_segments, padded
from penstock.backend.cuda.input_buffer import InputBuffer
from penstock.backend.cuda.inputs import AttentionPlan, Shape
from penstock.backend.cuda.loaded_program import LoadedProgram
from penstock.backend.cuda.program import StepSizes
from penstock.backend.cuda.programs import Programs
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.segments import plan_segments
from penstock.backend.cuda.step_layout import DeviceInputs


class Steps:
    """Runs steps of at most `sizes`. If `capture` is set, steps are padded to shapes that graphs are captured for."""

    def __init__(
        self, programs: Programs, buffer: InputBuffer, workspace: Workspace, sizes: StepSizes, capture: bool
    ) -> None:
        self._programs = programs
        self._buffer = buffer
        self._workspace = workspace
        self._fixed = workspace.tilings.fixed
        self._sizes = sizes
        self.capture = capture

    def forward(self, program: LoadedProgram, batch: Batch) -> Iterator[Sampling]:
        self._workspace.transfer.finish()
        work = self.plan(program, batch)
        return program.forward(batch, work.shape, self.send(program, batch, work))

    def plan(self, program: LoadedProgram, batch: Batch) -> AttentionPlan:
        launches, pad = program.program, partial(self.pad, program)
        if self._fixed:
            return plan_segments(batch, launches.run_sizes[-1], pad, whole_rows=launches.sees_whole_rows)
        return inputs.plan_attention(
            batch,
            program.tile_tokens,
            pad,
            self._sizes.rows,
            launches.run_sizes,
            program.sharing,
            program.expansion,
            launches.spare_splits,
        )

    def send(self, program: LoadedProgram, batch: Batch, work: AttentionPlan) -> DeviceInputs:
        shape = work.shape
        if shape.tokens > self._sizes.tokens or shape.decodes > self._sizes.rows:
            raise ValueError(f"a step of {shape.tokens} tokens and {shape.decodes} rows is larger than {self._sizes}")
        if len(batch.tables) != program.groups:
            raise ValueError(f"the cache has {program.groups} layer groups; got block tables for {len(batch.tables)}")
        if self._buffer.grow(batch):
            self._programs.forget_graphs()
        return self._buffer.send(batch, work, program.memory)

    def pad(self, program: LoadedProgram, shape: Shape) -> Shape:
        if (shape.tiles or shape.tokens > shape.decodes) and not self.capture:
            return shape
        larger = padded(shape, program.program.spare_splits)
        return larger if self.fits(larger) else shape

    def fits(self, shape: Shape) -> bool:
        return shape.tokens <= self._sizes.tokens and shape.sampled <= self._sizes.rows

    def shape_for(self, program: LoadedProgram, shape: Shape) -> Shape:
        if self._fixed:
            return self.pad(program, in_segments(shape, program.program.run_sizes[-1]))
        return program.usual(self.pad(program, shape))
