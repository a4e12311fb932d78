"""What stands before fake-gcs-server: conditions of PUT, and uploads in parts, which it lacks.

It knows the XML interface for reading; a PUT it takes only as one that was signed. Listings, ETags
and generations are its own.
"""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DROPPED = ("host", "transfer-encoding", "content-length", "connection", "date")
FAILED = b"<Error><Code>PreconditionFailed</Code></Error>"


class Handler(BaseHTTPRequestHandler):
    """Hands a request on to the server at `port`."""

    protocol_version = "HTTP/1.1"
    port: int
    uploads: dict[str, dict[int, bytes]]
    lock: threading.Lock

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _ask(self, verb: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        given = {k: v for k, v in self.headers.items() if k.lower() not in DROPPED}
        connection.request(verb, path, body, given)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        kept = ("transfer-encoding", "connection", "date")
        return answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in kept}, data

    def _body(self) -> bytes:
        if (self.headers.get("Transfer-Encoding") or "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict[str, str], data: bytes = b"") -> None:
        self.send_response(status)
        length = {"Content-Length": str(len(data))} if self.command != "HEAD" else {}
        for name, value in {**headers, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _put(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Put an object if its generation is the one that is asked for."""
        with self.lock:
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None:
                status, there, _ = self._ask("HEAD", path)
                if wanted != (there.get("X-Goog-Generation") if status == 200 else "0"):
                    return 412, {}, FAILED
            status, _, data = self._ask("PUT", f"{path}?X-Goog-Algorithm=x", body)
        if status != 200:
            return status, {}, data
        made = json.loads(data)
        return 200, {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""

    def do_POST(self) -> None:
        """Begin or end an upload in parts."""
        split, body = urlsplit(self.path), self._body()
        query = parse_qs(split.query, keep_blank_values=True)
        bucket, _, key = unquote(split.path[1:]).partition("/")
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            kind, text = "InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"
            status, headers = 200, dict[str, str]()
        elif "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"][0])
            whole = b"".join(parts[number] for number in sorted(parts))
            status, headers, _ = self._put(split.path, whole)
            kind = "CompleteMultipartUploadResult"
            text = f"<Location>l</Location><ETag>{headers.get('ETag')}</ETag>"
        else:
            self._answer(*self._ask("POST", self.path, body))
            return
        text = f"<Bucket>{bucket}</Bucket><Key>{key}</Key>{text}"
        self._answer(status, headers, f"<{kind}>{text}</{kind}>".encode())

    def do_PUT(self) -> None:
        """Put an object, or a part of one."""
        split, body = urlsplit(self.path), self._body()
        query = parse_qs(split.query)
        if "uploadId" in query:
            number = int(query["partNumber"][0])
            self.uploads[query["uploadId"][0]][number] = body
            self._answer(200, {"ETag": f'"{number}"'})
        else:
            self._answer(*self._put(split.path, body))

    def do_DELETE(self) -> None:
        """Remove an object, or give up an upload."""
        query = parse_qs(urlsplit(self.path).query)
        if "uploadId" in query:
            self.uploads.pop(query["uploadId"][0], None)
            self._answer(204, {})
        else:
            self._answer(*self._ask("DELETE", self.path))

    def do_GET(self) -> None:
        """Read or list."""
        self._answer(*self._ask(self.command, self.path))

    do_HEAD = do_GET


class Proxy(ThreadingHTTPServer):
    """A server whose threads end with the program."""

    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing: programs that are killed leave their connections."""


@contextmanager
def served(port: int) -> Iterator[int]:
    """Stand before the server at `port`; yield the port at which that is."""
    own = {"port": port, "uploads": {}, "lock": threading.Lock()}
    with Proxy(("127.0.0.1", 0), type("Bound", (Handler,), own)) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield proxy.server_address[1]
        proxy.shutdown()
        thread.join()
