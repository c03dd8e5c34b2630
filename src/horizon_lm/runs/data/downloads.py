"""Download images of rows once, into the cache of `datasets`, so that a row has the same image in each epoch and after a resume."""

import hashlib
import os
import threading
from urllib.request import HTTPRedirectHandler, Request, build_opener

from horizon_lm.runs.data.table_cache import cache_folder, digest

_SECONDS = 30  # without an answer


class _WebOnly(HTTPRedirectHandler):
    """Follows redirections to addresses of the web only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if not newurl.startswith(("http://", "https://")):
            raise ValueError("it is redirected to something else than an address of the web")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(address: str, max_bytes: int) -> bytes:
    """Return the content of an address of the web, from the cache if it was downloaded before.

    Raises:
        OSError: it cannot be downloaded, or not be cached.
        ValueError: it has more than ``max_bytes``, or is no address.
    """
    folder = cache_folder(digest("images"))
    file = folder / hashlib.sha256(address.encode()).hexdigest()
    if file.is_file():
        return file.read_bytes()
    request = Request(address, headers={"User-Agent": "horizon-lm"})
    with build_opener(_WebOnly).open(request, timeout=_SECONDS) as answer:
        content: bytes = answer.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes >> 20} MiB")
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}.part")
    part.write_bytes(content)
    part.replace(file)
    return content
