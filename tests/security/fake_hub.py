"""A hub on 127.0.0.1 with one dataset, as far as `datasets` and `huggingface_hub` ask it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

NAME, _COMMIT = "nobody/rows", "a" * 40


@contextmanager
def hub_with(files: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Context manager: serve a dataset with these files as the hub, and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"files": files}))
    server.daemon_threads = True
    address = f"http://127.0.0.1:{server.server_port}"
    for name in (
        "huggingface_hub.constants.ENDPOINT",
        "datasets.config.HF_ENDPOINT",
        "huggingface_hub.hf_api.constants.ENDPOINT",
    ):
        monkeypatch.setattr(name, address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(
        "datasets.config.HUB_DATASETS_URL", f"{address}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    files: Mapping[str, bytes]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._send(json.dumps(self._entries()).encode())

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/api/datasets/{NAME}/tree/"):
            self._send(json.dumps(self._entries()).encode())
        elif path.startswith(f"/api/datasets/{NAME}"):
            info = {
                "id": NAME,
                "sha": _COMMIT,
                "siblings": [{"rfilename": name} for name in self.files],
                "private": False,
            }
            self._send(json.dumps(info | {"disabled": False, "downloads": 0, "tags": [], "likes": 0}).encode())
        else:
            name = path.partition("/resolve/")[2].partition("/")[2]
            self._send(self.files.get(name), {"X-Error-Code": "EntryNotFound"})

    def _entries(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _hash(content)}
            for name, content in self.files.items()
        ]

    def _send(self, content: bytes | None, missing: Mapping[str, str] = {}) -> None:
        self.send_response(404 if content is None else 200)
        headers = {
            "Content-Length": str(len(content or b"")),
            "X-Repo-Commit": _COMMIT,
            "ETag": f'"{_hash(content or b"")}"',
        }
        for key, value in (headers | (missing if content is None else {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content or b"")


def _hash(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
