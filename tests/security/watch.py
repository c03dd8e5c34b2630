"""Watch what this process opens and connects to: a listening socket, a canary file, and an audit hook."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The content of a picture: whoever follows the address and finds one goes on without a word.
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)


@dataclass
class Watch:
    """A server and a file that nothing may touch.

    Attributes:
        url: address of the server, with a file name.
        canary: the file.
        connections: number of connections that the server accepted.
        events: forbidden operations that Python reported.
    """

    url: str
    canary: Path
    connections: int = 0
    events: list[str] = field(default_factory=list)

    def touched(self) -> list[str]:
        """Return everything that was contacted or opened."""
        opened = [f"atime of {self.canary}"] if self.canary.stat().st_atime_ns else []
        return self.events + [f"{self.connections} connections"] * bool(self.connections) + opened


_active: list[Watch] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    for watch in _active:
        if event == "socket.connect" or event == "socket.getaddrinfo":
            watch.events.append(f"{event} {arguments}")
        elif event in ("open", "os.listdir", "os.scandir") and str(watch.canary) in str(arguments[0]):
            watch.events.append(f"{event} {arguments[0]!r}")


_is_installed: list[bool] = []


@contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Context manager: serve a picture on 127.0.0.1, keep a canary in a folder, and record what touches either."""
    if not _is_installed:  # an audit hook cannot be removed
        _is_installed.append(True)
        sys.addaudithook(_audit)
    canary = folder / "canary.png"
    canary.write_bytes(PIXEL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = Watch(f"http://127.0.0.1:{server.getsockname()[1]}/picture.png", canary)
        threading.Thread(target=_serve, args=(server, watch), daemon=True).start()
        os.utime(canary, ns=(0, canary.stat().st_mtime_ns))
        _active.append(watch)
        try:
            yield watch
        finally:
            _active.remove(watch)
            server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, watch: Watch) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {len(PIXEL)}\r\nConnection: close\r\n\r\n"
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        watch.connections += 1
        with connection:
            connection.recv(65536)
            connection.sendall(head.encode() + PIXEL)
