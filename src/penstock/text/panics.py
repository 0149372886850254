"""Turns failures inside the tokenizer library into errors of ours. It is written in Rust, and a panic there arrives as
an exception that is none of Python's `Exception`s: it would end whatever handles those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import InvalidRequest, PenstockError

PANIC = "PanicException"  # of pyo3's runtime, which cannot be imported


def is_failure(error: BaseException) -> bool:
    """Returns whether the library failed, rather than the process being told to stop."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def refusal(error: BaseException) -> BaseException:
    """Returns the error for a text that the library fails on."""
    if not is_failure(error) or isinstance(error, PenstockError | MemoryError):
        return error
    return InvalidRequest(f"the model's tokenizer fails on this text: {error}")


@contextmanager
def panics_as(kind: Callable[[str], PenstockError], what: str) -> Iterator[None]:
    """Raises an error of this kind where the library panics; `what` it was doing then begins the message."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise kind(f"{what}: the tokenizer library failed: {error}") from error
