"""Converts failures inside the tokenizer library to Penstock errors. A panic in its Rust code arrives as a
BaseException that is not an `Exception`, and would terminate handlers of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import InvalidRequest, PenstockError

PANIC = "PanicException"  # raised by pyo3's runtime, which cannot be imported


def is_failure(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def refusal(error: BaseException) -> BaseException:
    if not is_failure(error) or isinstance(error, PenstockError | MemoryError):
        return error
    return InvalidRequest(f"the model's tokenizer fails on this text: {error}")


@contextmanager
def panics_as(kind: Callable[[str], PenstockError], what: str) -> Iterator[None]:
    """Converts library panics to this kind of error; `what` begins the message."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise kind(f"{what}: the tokenizer library failed: {error}") from error
