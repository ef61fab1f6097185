"""A server that answers as Google Cloud Storage does (its JSON API), with buckets in memory.

Objects are written as a whole, read (also in part), listed, moved one by one and deleted, each
under a generation precondition if the request has one. They cannot be appended to, and there are no
folders. gcsfs, google-cloud-storage and TensorStore find the server by environment variables.

The fixtures `gcs` and `machine` are for the tests of buckets."""

import functools
import http.server
import itertools
import json
import re
import socket
import sys
import threading
import time
import urllib.parse
from typing import NamedTuple

import pytest

from transformer import buckets

OBJECT = re.compile(r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?")


class Stored(NamedTuple):
    content: bytes
    generation: int
    written: float


class FakeGCS:
    """The server. `buckets` maps bucket -> name -> object. Each request takes `delay` seconds more,
    and fails if its path begins with `refuse`."""

    def __init__(self, *buckets: str):
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.delay, self.refuse = 0.0, None
        self.requests, self.lock = [], threading.Lock()
        self.generations, self.uploads = itertools.count(1), {}
        handler = type("Handler", (_Handler,), {"gcs": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that direct clients to this server."""
        url = f"http://127.0.0.1:{self.server.server_port}"
        hosts = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), url)
        return hosts | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # needs credentials

    def write(self, bucket: str, name: str, content: bytes) -> None:
        with self.lock:
            self.buckets[bucket][name] = Stored(content, next(self.generations), time.time())

    def names(self, bucket: str, prefix: str) -> set[str]:
        names = list(self.buckets[bucket])
        return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # TensorStore opens many connections at once

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # gcsfs cancels requests
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    gcs: FakeGCS
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(self.gcs.delay)
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.gcs.requests.append(f"{self.command} {self.path}")
        if self.gcs.refuse and self.path.startswith(self.gcs.refuse):
            return self.fail(403, "The caller does not have access.")
        match = OBJECT.fullmatch(url.path)
        if match is None or match[2] not in self.gcs.buckets:
            return self.fail(404, f"no method or bucket {url.path}")
        kind, self.bucket, name = match.groups()
        self.objects = self.gcs.buckets[self.bucket]
        with self.gcs.lock:
            if kind == "/upload":
                return self.upload()
            if name is None:
                return self.list() if url.path.endswith("/o") else self.answer(200, {"name": "b"})
            name, _, target = name.partition("/moveTo/o/")
            return self.use(urllib.parse.unquote(name), urllib.parse.unquote(target), kind)

    do_POST = do_PUT = do_DELETE = do_GET

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        if not isinstance(body, bytes):
            body, headers["Content_Type"] = json.dumps(body).encode(), "application/json"
        self.send_response(status)
        for name, value in (headers | {"Content_Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status: int, message: str) -> None:
        self.answer(status, {"error": {"code": status, "message": message}})

    def meets_precondition(self, name: str) -> bool:
        generation = self.objects[name].generation if name in self.objects else 0
        wanted = self.query.get("ifGenerationMatch", str(generation))
        if int(wanted) != generation:
            self.fail(412, "At least one of the pre-conditions you specified did not hold.")
        return int(wanted) == generation

    def use(self, name: str, target: str, kind: str | None) -> None:
        """Answers a request for one object: its description, content, move or deletion."""
        if name not in self.objects:
            return self.fail(404, f"No such object: {self.bucket}/{name}")
        if not self.meets_precondition(name):
            return None
        if self.command == "DELETE":
            del self.objects[name]
            return self.answer(204)
        content, generation, _ = self.objects[name]
        if target:
            del self.objects[name]
            self.objects[target] = Stored(content, next(self.gcs.generations), time.time())
            return self.answer(200, self.describe(target))
        if kind != "/download" and self.query.get("alt") != "media":
            return self.answer(200, self.describe(name))
        told = {"X_Goog_Generation": str(generation)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return self.answer(200, content, **told)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            return self.fail(416, "no such range")
        where = f"bytes {first}-{last}/{len(content)}"
        return self.answer(206, content[first : last + 1], Content_Range=where, **told)

    def describe(self, name: str) -> dict:
        stored = self.objects[name]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(stored.written))
        stamp += f".{int(stored.written % 1 * 1000):03d}Z"
        numbers = {"size": len(stored.content), "generation": stored.generation}
        about = {"bucket": self.bucket, "name": name, "updated": stamp, "timeCreated": stamp}
        return about | {key: str(x) for key, x in numbers.items()} | {"metageneration": "1"}

    def list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        items, folders = [], set()
        for name in sorted(self.objects):
            folder, inside, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if name.startswith(prefix) and inside:
                folders.add(prefix + folder + inside)
            elif name.startswith(prefix):
                items.append(self.describe(name))
        self.answer(200, {"items": items, "prefixes": sorted(folders)})

    def upload(self) -> None:
        """Answers a simple, multipart or resumable upload."""
        kind, name, content = self.query["uploadType"], self.query.get("name"), self.body
        if kind == "resumable" and "upload_id" not in self.query:
            key, name = str(next(self.gcs.generations)), name or json.loads(self.body)["name"]
            self.gcs.uploads[key] = [name, self.query, b""]
            host = self.headers["Host"]
            url = f"http://{host}/upload/storage/v1/b/{self.bucket}/o?uploadType=resumable"
            return self.answer(200, {}, Location=f"{url}&upload_id={key}")
        if kind == "resumable":
            upload = self.gcs.uploads[self.query["upload_id"]]
            upload[2] += self.body
            if self.headers.get("Content-Range", "").endswith("/*"):
                return self.answer(308, Range=f"bytes=0-{len(upload[2]) - 1}")
            name, self.query, content = upload
        elif kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[1]
            _, head, media, _ = self.body.split(b"--" + boundary.encode())
            body = lambda part: re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1]
            name = json.loads(body(head))["name"]
            content = re.sub(rb"\r?\n\Z", b"", body(media))
        if self.meets_precondition(name):
            self.objects[name] = Stored(content, next(self.gcs.generations), time.time())
            self.answer(200, self.describe(name))
        return None


@functools.cache  # one in each process: clients keep the address of the first
def _server() -> FakeGCS:
    return FakeGCS("bucket")


@pytest.fixture
def gcs(monkeypatch):
    server = _server()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield server
    server.refuse = None
    _leave()


def close_mirrors() -> None:
    """Ends the work on all mirrors, as a command does."""
    with buckets.closing():
        pass


def _leave() -> None:
    """Ends the work on all mirrors without a last synchronization."""
    while buckets._opened:
        buckets._opened.popitem()[1].set()


@pytest.fixture
def machine(gcs, tmp_path, monkeypatch):
    """Returns a function that turns this process into one of another machine."""

    def become(name: str, *, known=False) -> None:
        """With `known`, the machine has the host name of this one, as child processes expect."""
        _leave()
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path / name))
        if not known:
            monkeypatch.setattr(socket, "gethostname", lambda: name)

    return become
