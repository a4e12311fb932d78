"""A small S3 server on the loopback, with latency, bandwidth per stream, and faults.

``python tests/object_server.py [PORT]`` serves until it is ended, and prints its port first.
Objects are in memory. It knows GET and HEAD with Range and If-Match, PUT (also If-None-Match and
If-Match), DELETE, ListObjectsV2, and uploads in several parts; it checks no signatures.
``GET /-set?latency=0.03&bandwidth=1e8&500=0.05`` sets how it answers, ``/-stat`` returns counters.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import sys
import threading
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from xml.sax.saxutils import escape, unescape

SETTINGS = ("latency", "bandwidth", "slow", "500", "503", "reset", "short", "lost", "etag", "moved")
HABITS = ("bare-list", "bare-match", "unconditional", "private", "denied")


class Server:
    """Objects of buckets, and how requests for them are answered.

    `latency` in seconds, `bandwidth` in bytes per second of a stream (0: no limit), `slow` in
    seconds for one of 50 requests; the probabilities of 500, 503, a reset before the answer, a body
    cut short, a reset after an object or part was put (`lost`), another ETag in an answer (`etag`),
    and of ignoring If-Match (`moved`).

    Habits of real stores, by 1.0: ETags in listings have no quotes (`bare-list`, Azure), PUT
    compares If-Match with an ETag without quotes (`bare-match`, Ceph), PUT ignores conditions
    (`unconditional`), listing is forbidden, and so is what is not there (`private`), all is
    (`denied`). A bucket that is not in `buckets` is not found; what tests put makes its bucket.
    """

    def __init__(self, **settings):
        self.objects, self.uploads = {}, {}
        self.stat = dict.fromkeys(
            ("requests", "gets", "bytes", "flying", "most", "faults", "puts"), 0
        )
        self.set = dict.fromkeys((*SETTINGS, *HABITS), 0.0) | settings
        self.buckets = {"b"}
        self.random = random.Random(1)
        self.sleeping = 0

    def clear(self):
        """Have no objects, faults or counts."""
        self.objects.clear()
        self.uploads.clear()
        self.set.update(dict.fromkeys(self.set, 0.0))
        self.stat.update(dict.fromkeys(set(self.stat) - {"flying"}, 0))

    def put(self, path, data):
        data = bytes(data)
        self.buckets.add(path.split("/")[1])
        self.objects[path] = data, f'"{hashlib.md5(data).hexdigest()}"'
        return self.objects[path][1]

    async def serve(self, reader, writer):
        try:
            while True:
                text = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                lines = text.split("\r\n")
                verb, target, _ = lines[0].split(" ", 2)
                pairs = (line.partition(":") for line in lines[1:] if line)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path, _, query = target.partition("?")
                query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
                path = urllib.parse.unquote(path)
                if path == "/-stat":
                    await self._send(writer, 200, json.dumps(self.stat).encode())
                elif path == "/-set":
                    self.set.update({name: float(value) for name, value in query.items()})
                    self.stat.update(dict.fromkeys(set(self.stat) - {"flying"}, 0))
                    await self._send(writer, 200)
                else:
                    self.stat["requests"] += 1
                    self.stat["flying"] += 1
                    self.stat["most"] = max(self.stat["most"], self.stat["flying"])
                    try:
                        if not await self._answer(writer, verb, path, query, headers, body):
                            return
                    finally:
                        self.stat["flying"] -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer, verb, path, query, headers, body):
        chance = self.random.random
        slow = self.set["slow"] if self.set["slow"] and chance() < 0.02 else 0
        sent = len(body) / self.set["bandwidth"] if self.set["bandwidth"] else 0
        await asyncio.sleep(self.set["latency"] + slow + sent)
        if chance() < self.set["reset"]:
            self.stat["faults"] += 1
            writer.transport.abort()
            return False
        for code in (500, 503):
            if chance() < self.set[str(code)]:
                self.stat["faults"] += 1
                await self._send(writer, code, b"<Error><Code>SlowDown</Code></Error>")
                return True
        is_list = "list-type" in query
        missing = verb in ("GET", "HEAD") and (is_list or path not in self.objects)
        if self.set["denied"] or (self.set["private"] and missing):
            await self._send(writer, 403, b"<Error><Code>AccessDenied</Code></Error>", verb=verb)
            return True
        if verb == "PUT" and path.count("/") == 1:
            self.buckets.add(path[1:])
            await self._send(writer, 200)
            return True
        if path.split("/")[1] not in self.buckets:
            await self._send(writer, 404, b"<Error><Code>NoSuchBucket</Code></Error>", verb=verb)
            return True
        if verb in ("GET", "HEAD"):
            if is_list:
                await self._send(writer, 200, self._listing(path, query))
                return True
            return await self._get(writer, verb, path, headers)
        code, more, answer = self._write(verb, path, query, headers, body)
        if verb == "PUT" and chance() < self.set["lost"]:
            self.stat["faults"] += 1
            writer.transport.abort()
            return False
        await self._send(writer, code, answer, more)
        return True

    def _write(self, verb, path, query, headers, body):
        if verb == "DELETE":
            self.uploads.pop(query.get("uploadId"), None) or self.objects.pop(path, None)
            return 204, {}, b""
        if verb == "POST" and "uploads" in query:
            upload = hashlib.md5(os.urandom(8)).hexdigest()
            self.uploads[upload] = {}
            text = f"<UploadId>{upload}</UploadId><Key>{escape(path)}</Key><Bucket>b</Bucket>"
            text = f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>"
            return 200, {}, text.encode()
        if verb == "POST" and "delete" in query:
            keys = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", body.decode())]
            for key in keys:
                self.objects.pop(f"{path.rstrip('/')}/{key}", None)
            text = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return 200, {}, f"<DeleteResult>{text}</DeleteResult>".encode()
        if verb == "POST":
            parts = self.uploads.pop(query["uploadId"])
            data = b"".join(parts[k] for k in sorted(parts))
            etag = f'"{hashlib.md5(data).hexdigest()}-{len(parts)}"'
            self.objects[path] = data, etag
            text = (
                f"<ETag>{escape(etag)}</ETag><Key>k</Key><Bucket>b</Bucket><Location>l</Location>"
            )
            text = f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>"
            return 200, {}, text.encode()
        if "uploadId" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
        known = self.objects.get(path)
        wanted = headers.get("if-match")
        etag = known and (known[1].strip('"') if self.set["bare-match"] else known[1])
        refused = (headers.get("if-none-match") == "*" and known) or (wanted and wanted != etag)
        if refused and not self.set["unconditional"]:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        self.stat["puts"] += 1
        return 200, {"ETag": self.put(path, body)}, b""

    async def _get(self, writer, verb, path, headers):
        if path not in self.objects:
            await self._send(writer, 404, b"<Error><Code>NoSuchKey</Code></Error>", verb=verb)
            return True
        data, etag = self.objects[path]
        wanted = headers.get("if-match")
        if wanted and wanted != etag and self.random.random() >= self.set["moved"]:
            await self._send(writer, 412, b"", verb=verb)
            return True
        if self.random.random() < self.set["etag"]:
            etag = '"another"'
        start, stop = 0, len(data)
        asked = headers.get("range", "").removeprefix("bytes=")
        more = {"ETag": etag, "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
        if asked:
            first, _, last = asked.partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            stop = min(int(last) + 1, len(data)) if first and last else len(data)
            if start >= len(data):
                await self._send(writer, 416, b"")
                return True
            more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if verb == "HEAD":
            await self._send(writer, 200, data, more, verb=verb)
            return True
        self.stat["gets"] += 1
        is_short = self.random.random() < self.set["short"]
        end = (start + stop) // 2 if is_short else stop
        await self._send(writer, 206 if asked else 200, data[start:stop], more, stop=end - start)
        if is_short:
            self.stat["faults"] += 1
            writer.transport.abort()
        return not is_short

    def _listing(self, path, query):
        bucket = path.strip("/")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        begin = f"/{bucket}/"
        keys = sorted(p[len(begin) :] for p in self.objects if p.startswith(begin + prefix))
        text, prefixes = "", set()
        for key in keys:
            below = key[len(prefix) :]
            if delimiter and delimiter in below:
                prefixes.add(prefix + below.partition(delimiter)[0] + delimiter)
                continue
            data, etag = self.objects[begin + key]
            etag = etag.strip('"') if self.set["bare-list"] else etag
            text += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
                f"<ETag>{escape(etag)}</ETag><LastModified>2026-11-22T00:00:00.000Z</LastModified>"
                "</Contents>"
            )
        for each in sorted(prefixes):
            text += f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>"
        return text.encode()

    async def _send(self, writer, code, body=b"", more=(), verb="GET", stop=None):
        head = [f"HTTP/1.1 {code} Answer", f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in dict(more).items()]
        writer.write(("\r\n".join(head) + "\r\n\r\n").encode())
        if verb != "HEAD":
            body = memoryview(body)[:stop]
            rate, began = self.set["bandwidth"], asyncio.get_running_loop().time()
            step = 1 << 16 if rate else 1 << 20
            for at in range(0, len(body), step):
                writer.write(body[at : at + step])
                await writer.drain()
                self.stat["bytes"] += len(body[at : at + step])
                ahead = began - asyncio.get_running_loop().time()
                if rate and ahead + (at + step) / rate > 0.001:
                    await asyncio.sleep(ahead + (at + step) / rate)
        await writer.drain()


async def listen(server, port, started):
    opened = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=512)
    started(opened.sockets[0].getsockname()[1])
    try:
        await asyncio.get_running_loop().create_future()  # until it is cancelled
    finally:
        opened.close()  # Python 3.12 and newer would wait for clients, too


class Running:
    """A server in a thread of this process; left, it has ended."""

    def __init__(self, **settings):
        self.server = Server(**settings)
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        def run():
            def started(port):
                self.port = port
                ready.set()

            self._task = self._loop.create_task(listen(self.server, 0, started))
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            for task in (rest := asyncio.all_tasks(self._loop)):
                task.cancel()
            if rest:
                self._loop.run_until_complete(asyncio.wait(rest))
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def close(self):
        from dsprep.storage.objects import requests

        requests.close()
        counters = requests.counters  # which commands report
        counters.update(dict.fromkeys(counters, 0))
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


@contextmanager
def fresh_forkserver(*preloaded):
    """Have a forkserver of the environment as it is now: one keeps that in which it started."""
    forkserver._forkserver._stop()
    forkserver.set_forkserver_preload(["__main__", *preloaded])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()
    forkserver.set_forkserver_preload(["__main__"])


KEYS = {"AWS_ACCESS_KEY_ID": "AKIANOBODY", "AWS_SECRET_ACCESS_KEY": "secret-secret"}


@contextmanager
def serving(*preloaded):
    """Give a server that ``s3://`` leads to, also in processes of a forkserver."""
    import pytest

    made = Running()
    made.server.endpoint = made.endpoint
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": made.endpoint, "AWS_REGION": "r"}.items():
            patch.setenv(name, value)
        with fresh_forkserver(*preloaded):
            yield made.server
    made.close()


def forget():
    """Have stores made again, from the environment as it is then."""
    from dsprep.storage import paths

    for scheme in paths.SCHEMES:
        paths._stores.pop(scheme, None)


if __name__ == "__main__":
    asyncio.run(
        listen(
            Server(), int(sys.argv[1]) if sys.argv[1:] else 0, lambda port: print(port, flush=True)
        )
    )
