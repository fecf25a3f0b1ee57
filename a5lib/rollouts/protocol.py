"""The protocol between the trainer and the vLLM worker: one JSON object a line, over a pair of connected sockets of
their own, so that what vLLM prints cannot get in between. Nothing is pickled.

    request    {"id": 7, "method": "load", "seconds": 120, "arguments": {...}}
    progress   {"id": 7, "progress": 3}                 as often as the worker likes, before its answer
    answer     {"id": 7, "result": ...}                 it is done
               {"id": 7, "refused": "a sentence"}       it cannot be done now, and nothing has changed
               {"id": 7, "failed": "a sentence"}        it went wrong, and the worker's state is unknown

The trainer asks and the worker answers, one request at a time. This file knows lines and not what they ask for. Both
Pythons run it, so it needs the standard library alone.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

VERSION = 1  # of the requests and answers; the worker refuses a trainer of another one
LONGEST_LINE = 2**28  # bytes; the answer with 256 responses of 4,096 tokens has some 2**25


class Garbage(ValueError):
    """What came over the connection is not a message of this protocol."""


class Refusal(Exception):
    """The worker cannot do now what it is asked for; nothing has changed, and it can be asked again."""


class Connection:
    """One end of the pair: whole messages go in and come out.

    >>> ours, theirs = (Connection(end) for end in socket.socketpair())
    >>> ours.send({"id": 1, "method": "memory"})
    >>> theirs.receive(seconds=1)
    {'id': 1, 'method': 'memory'}
    >>> ours.close()
    >>> theirs.receive() is None
    True
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._received = bytearray()  # bytes that no whole line has been made of yet

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other side did not take it within `seconds` (None: wait for ever).
            ConnectionError: the other side has gone.
        """
        self.end.settimeout(seconds)
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message, or None when the other side has gone.

        Raises:
            TimeoutError: no whole line came within `seconds` (None: wait for ever).
            Garbage: what came is not one JSON object in a line.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > LONGEST_LINE:
                raise Garbage(f"a line of more than {LONGEST_LINE} bytes that begins with {_beginning(self._received)}")
            self.end.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            try:
                piece = self.end.recv(2**20)
            except ConnectionError:  # it went without reading all that was sent to it
                piece = b""
            if not piece:
                return None
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            message = None
        if not isinstance(message, dict):
            raise Garbage(f"a line that begins with {_beginning(line)}")
        return message

    def close(self) -> None:
        """Hang up; the other side then receives None. Closing twice is harmless."""
        self.end.close()


def _beginning(line: bytes | bytearray) -> str:
    return repr(bytes(line[:60])).removeprefix("b")
