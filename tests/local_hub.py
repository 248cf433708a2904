"""A Hub on this machine, with as much of its API as loading one kernel takes."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_kernel(repo: str, build: Path) -> Generator[str]:
    """Serve `build` as the repository's version 1; gives the address for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == f"/api/kernels/{repo}/refs":
                branch = {"name": "v1", "ref": "refs/heads/v1", "targetCommit": COMMIT}
                self._reply_json({"branches": [branch], "converts": [], "tags": []})
            elif path.startswith(f"/api/kernels/{repo}/tree/{COMMIT}"):
                self._reply_json(_tree(build, recursive="recursive=true" in self.path.lower()))
            elif path.startswith(prefix := f"/kernels/{repo}/resolve/{COMMIT}/build/"):
                self._reply((build / path.removeprefix(prefix)).read_bytes())
            else:
                self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
            """Keeps requests out of the tests' output."""

        def _reply_json(self, value: Any) -> None:
            self._reply(json.dumps(value).encode(), content_type="application/json")

        def _reply(self, body: bytes, content_type: str = "text/plain") -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _tree(build: Path, *, recursive: bool) -> list[dict[str, Any]]:
    if not recursive:
        return [{"type": "directory", "oid": COMMIT, "path": f"build/{p.name}"} for p in build.iterdir()]
    return [
        {"type": "file", "oid": COMMIT, "size": p.stat().st_size, "path": f"build/{p.relative_to(build)}"}
        for p in build.rglob("*")
        if p.is_file()
    ]
