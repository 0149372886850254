"""Interprets the part of Gluon that our Hopper kernels use, on a machine without a GPU. Triton's own interpreter does
not know Gluon.

It is made to find faults, so it models what a program may rely on instead of what a GPU happens to do:

- Copies into shared memory land as late as they may, products are computed as late as they may, and what they will
  write holds NaN until then.
- Vector clocks say which accesses to shared memory are ordered by barriers. Two that are not, of which one writes, are
  a fault whether or not they met in this run.
- Partitions of a program take turns at random, from a fixed seed. A deadlock says what each of them waits for.

Not modelled: layouts of registers, which the compiler checks; the threads of a partition, which the compiler keeps in
step; the order of accesses to global memory, but for writes before the wait for an earlier kernel (PDL).

Files: `registers` (values), `memory` (global memory), `shared` (shared memory), `machine` (partitions, barriers,
copies, products), `language` (what kernels call) and `launch`.
"""
