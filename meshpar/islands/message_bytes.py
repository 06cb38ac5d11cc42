"""Bytes of the values in a message, without headers."""

from typing import Any

import numpy as np

from meshpar.islands.messages import (
    Aggregate,
    Forward,
    Install,
    Payload,
    Push,
    Request,
    SetValues,
    Values,
)


def message_bytes(message: Any) -> int:
    """Bytes of the arrays in a message; 0 for one that carries none."""
    match message:
        case Request() | Forward():
            match message.operation:
                case Push(_, _, _, payload):
                    return payload_bytes(payload)
                case SetValues(_, _, values):
                    return values.nbytes
                case Aggregate(_, _, _, average) if average is not None:
                    return _data_bytes((average.keys, average.values))
        case Values():
            return 0 if message.values is None else message.values.nbytes
        case Install():
            return sum(array.nbytes for array in message.state.values())
    return 0


def payload_bytes(payload: Payload | None) -> int:
    """Bytes of the payload of a push."""
    if payload is None:
        return 0
    return _data_bytes(payload.data) + _data_bytes(payload.read)


def _data_bytes(data: Any) -> int:
    if isinstance(data, np.ndarray):
        return data.nbytes
    if isinstance(data, dict):
        return sum(map(_data_bytes, data.values()))
    if isinstance(data, tuple | list):
        return sum(map(_data_bytes, data))
    return len(data) if isinstance(data, bytes) else 0
