"""Turns batches into bytes and back, to send them to another process: msgpack, with arrays as raw bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.backend.base import Batch


class Array(msgspec.Struct, array_like=True):
    """Holds an array as it is sent."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode_batch(batch: Batch) -> bytes:
    return _ENCODER.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """Returns the batch that `encode_batch` made bytes of; raises msgspec.MsgspecError for other bytes."""
    return _DECODER.decode(data)


def _encode(value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a batch holds arrays and plain data only; got {type(value).__name__}")
    return Array(value.dtype.str, value.shape, value.tobytes())


def _decode(type: Any, value: Any) -> Any:
    array = msgspec.convert(value, Array)
    return np.frombuffer(bytearray(array.data), array.dtype).reshape(array.shape)  # writable, as torch wants it


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_DECODER = msgspec.msgpack.Decoder(Batch, dec_hook=_decode)
