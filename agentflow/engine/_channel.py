"""Messages between this process and the engine's host process: a length, then a pickle of plain values.

Both ends hold one half of a socket pair that no other process can reach.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

__all__ = ["areceive", "pack", "receive"]

_LENGTH = struct.Struct("!I")


def pack(message: tuple[Any, ...]) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


async def areceive(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """The next message, or None when the other end is gone."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, OSError):
        return None
    message: tuple[Any, ...] = pickle.loads(body)
    return message


def receive(sock: socket.socket) -> tuple[Any, ...] | None:
    """Like :func:`areceive`, blocking."""
    header = _exactly(sock, _LENGTH.size)
    body = _exactly(sock, _LENGTH.unpack(header)[0]) if header is not None else None
    if body is None:
        return None
    message: tuple[Any, ...] = pickle.loads(body)
    return message


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
