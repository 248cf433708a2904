"""What the local Hub answers: what huggingface_hub 2.4 and kernels 0.17 ask of kernel repositories."""

import base64
import json
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from hub_state import TOKEN, USER, Blob, Fault, HubState, Repository

REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
# Endpoints that only an owner of the token may use.
WRITES = r"/api/repos/create|/api/kernels/.*/(branch|preupload|commit)/|.*/info/lfs/"


class RefusedError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, code: str = "", **more: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": message} | more
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}


class HubRequestHandler(BaseHTTPRequestHandler):
    """Finds the endpoint of a request by its path, lets the faults happen, and answers."""

    hub: HubState

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        self.body = self._read_body()
        path = urlsplit(self.path).path
        self.struck = self.hub.strike(f"{self.command} {path}")
        for fault in self.struck:
            if fault.before is not None:
                fault.before()
        if self._meets("cut"):
            return self._close()
        if self._meets("error"):
            return self.reply_json({"error": "Internal Server Error"}, status=500)
        try:
            self._check_token(path)
            with self.hub.lock:
                answer = self._find(path)
            answer()
        except RefusedError as refused:
            body = json.dumps(refused.body).encode()
            self.reply(body, {"Content-Type": "application/json"} | refused.headers, refused.status)
        return None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Keeps requests out of the tests' output."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(chunks)

    @property
    def endpoint(self) -> str:
        return f"http://{self.headers['Host']}"

    def _close(self) -> None:
        """As when the network breaks: the client has no answer, or half of one."""
        self.connection.shutdown(socket.SHUT_RDWR)

    def _meets(self, kind: str) -> list[Fault]:
        return [fault for fault in self.struck if fault.kind == kind]

    def _check_token(self, path: str) -> None:
        given = self.headers.get("Authorization")
        if given is not None and given != f"Bearer {TOKEN}":
            raise RefusedError(401, "Invalid credentials in Authorization header")
        if given is None and (re.match(WRITES, path) or path == "/api/whoami-v2"):
            raise RefusedError(401, "Invalid username or password.")

    def _find(self, path: str) -> Callable[[], None]:
        """Carry the request out, and return what sends the answer."""
        for method, pattern, endpoint in ENDPOINTS:
            if method in (self.command, "GET" if self.command == "HEAD" else "") and (
                found := re.fullmatch(pattern, path)
            ):
                # Only now, as a revision may hold a slash.
                parts = {key: part and unquote(part) for key, part in found.groupdict().items()}
                return endpoint(self, **parts)
        raise RefusedError(404, f"no such endpoint: {path}")

    def json_answer(self, value: Any) -> Callable[[], None]:
        return lambda: self.reply_json(value)

    def reply_json(self, value: Any, status: int = 200) -> None:
        self.reply(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    def reply(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        if self._meets("cut after"):
            return self._close()
        if self._meets("tamper"):
            body = body[:-1] + bytes([body[-1] ^ 1])
        if (wanted := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) and status == 200:
            start = int(wanted[1])
            headers = headers | {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
            body, status = body[start:], 206
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = bool(self._meets("cut within"))
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.wfile.flush()
                self._close()
        return None

    def repository(self, repo: str) -> Repository:
        if repo not in self.hub.repositories:
            status = 404 if "Authorization" in self.headers else 401
            raise RefusedError(status, "Repository not found", "RepoNotFound")
        return self.hub.repositories[repo]

    def resolve(self, repo: str, revision: str) -> str:
        oid = self.repository(repo).resolve(revision)
        if oid is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid


Endpoint = Callable[..., Callable[[], None]]


def who_am_i(request: HubRequestHandler) -> Callable[[], None]:
    return request.json_answer({"type": "user", "name": USER, "orgs": [{"name": "org"}]})


def organization(request: HubRequestHandler, name: str) -> Callable[[], None]:
    trusted = name in request.hub.trusted_publishers
    return request.json_answer({"name": name, "fullname": name, "trustedKernelPublisher": trusted})


def create_repository(request: HubRequestHandler) -> Callable[[], None]:
    wanted = json.loads(request.body)
    repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
    url = f"{request.endpoint}/kernels/{repo}"
    if wanted["type"] != "kernel":
        raise RefusedError(400, f"this Hub holds only kernels, not {wanted['type']}")
    if repo.split("/")[0] not in (USER, "org"):
        raise RefusedError(403, f"You don't have the rights to create a kernel under the namespace of {repo}")
    if repo in request.hub.repositories:
        raise RefusedError(409, "You already created this kernel repo", url=url)
    request.hub.repositories[repo] = Repository()
    request.hub.repositories[repo].commit("main", {".gitattributes": Blob(b"*.png filter=lfs\n")})
    return request.json_answer({"url": url})


def info(request: HubRequestHandler, repo: str, revision: str | None = None) -> Callable[[], None]:
    return request.json_answer({"id": repo, "sha": request.resolve(repo, revision or "main")})


def refs(request: HubRequestHandler, repo: str) -> Callable[[], None]:
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
        for name, oid in request.repository(repo).branches.items()
    ]
    return request.json_answer({"branches": branches, "converts": [], "tags": []})


def create_branch(request: HubRequestHandler, repo: str, branch: str) -> Callable[[], None]:
    repository = request.repository(repo)
    if branch in repository.branches:
        raise RefusedError(409, f"Reference {branch} already exists")
    repository.branches[branch] = request.resolve(
        repo, json.loads(request.body or b"{}").get("startingPoint", "main")
    )
    return request.json_answer({})


def preupload(request: HubRequestHandler, repo: str, revision: str) -> Callable[[], None]:
    there = request.repository(repo).commits[request.resolve(repo, revision)]
    files = [
        {
            "path": file["path"],
            "uploadMode": "lfs" if file["path"].endswith(".png") else "regular",
            "shouldIgnore": False,
            "oid": None if blob is None else blob.sha256 if blob.large else blob.oid,
        }
        for file in json.loads(request.body)["files"]
        for blob in [there.get(file["path"])]
    ]
    return request.json_answer({"files": files})


def lfs_batch(request: HubRequestHandler, repo: str) -> Callable[[], None]:
    request.repository(repo)
    wanted = json.loads(request.body)
    if "basic" not in wanted["transfers"]:
        raise RefusedError(400, f"this Hub speaks only the transfer basic, not {wanted['transfers']}")
    objects = [dict(each) for each in wanted["objects"]]
    for each in objects:
        if each["oid"] not in request.hub.large_files:
            each["actions"] = {
                "upload": {"href": f"{request.endpoint}/lfs/{each['oid']}"},
                "verify": {"href": f"{request.endpoint}/lfs/{each['oid']}/verify"},
            }
    return request.json_answer({"transfer": "basic", "objects": objects})


def put_large_file(request: HubRequestHandler, oid: str) -> Callable[[], None]:
    if Blob(request.body).sha256 != oid:
        raise RefusedError(400, "The content does not have this SHA-256")
    request.hub.large_files[oid] = request.body
    return request.json_answer({})


def verify_large_file(request: HubRequestHandler, oid: str) -> Callable[[], None]:
    if len(request.hub.large_files.get(oid, b"")) != json.loads(request.body)["size"]:
        raise RefusedError(404, "The file was not uploaded")
    return request.json_answer({})


def get_large_file(request: HubRequestHandler, oid: str) -> Callable[[], None]:
    body = request.hub.large_files[oid]
    return lambda: request.reply(body, {"ETag": f'"{oid}"'})


def commit(request: HubRequestHandler, repo: str, revision: str) -> Callable[[], None]:
    repository = request.repository(repo)
    if revision not in repository.branches:
        raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    lines = [json.loads(line) for line in request.body.splitlines()]
    parent = next(line["value"] for line in lines if line["key"] == "header").get("parentCommit")
    if parent not in (None, repository.branches[revision]):
        raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
    files = dict(repository.commits[repository.branches[revision]])
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in request.hub.large_files:
                raise RefusedError(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
            files[value["path"]] = Blob(request.hub.large_files[value["oid"]], large=True)
        elif key == "deletedFile":
            del files[value["path"]]
    oid = repository.commit(revision, files)
    url = f"{request.endpoint}/kernels/{repo}/commit/{oid}"
    return request.json_answer({"commitUrl": url, "commitOid": oid, "success": True})


def tree(request: HubRequestHandler, repo: str, revision: str, folder: str | None) -> Callable[[], None]:
    files = request.repository(repo).commits[request.resolve(repo, revision)]
    prefix = f"{folder.strip('/')}/" if folder and folder.strip("/") else ""
    recursive = "recursive=true" in request.path.lower()
    entries: dict[str, dict[str, Any]] = {}
    for path, blob in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        first, slash, _ = path.removeprefix(prefix).partition("/")
        if slash and not recursive:
            entries[first] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + first}
            continue
        entries[path] = {"type": "file", "oid": blob.oid, "size": len(blob.content), "path": path}
        if blob.large:
            lfs = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": len(blob.pointer)}
            entries[path]["lfs"] = lfs
    if prefix and not entries:
        raise RefusedError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    return request.json_answer(list(entries.values()))


def resolve(request: HubRequestHandler, repo: str, revision: str, path: str) -> Callable[[], None]:
    oid = request.resolve(repo, revision)
    blob = request.repository(repo).commits[oid].get(path)
    if blob is None:
        raise RefusedError(404, "Entry not found", "EntryNotFound")
    headers = {"X-Repo-Commit": oid}
    if blob.large:
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        # Large files come from another host; only that keeps the client from asking it for the commit.
        elsewhere = request.endpoint.replace("127.0.0.1", "localhost")
        location = {"Location": f"{elsewhere}/lfs/{blob.sha256}"}
        return lambda: request.reply(b"", headers | linked | location, status=302)
    return lambda: request.reply(blob.content, headers | {"ETag": f'"{blob.oid}"'})


KERNEL = rf"/api/kernels/{REPO}"
ENDPOINTS: list[tuple[str, str, Endpoint]] = [
    ("GET", "/api/whoami-v2", who_am_i),
    ("GET", r"/api/organizations/(?P<name>[^/]+)/overview", organization),
    ("POST", "/api/validate-yaml", lambda request: request.json_answer({"warnings": [], "errors": []})),
    ("POST", "/api/repos/create", create_repository),
    ("GET", KERNEL, info),
    ("GET", rf"{KERNEL}/revision/(?P<revision>[^/]+)", info),
    ("GET", rf"{KERNEL}/refs", refs),
    ("POST", rf"{KERNEL}/branch/(?P<branch>[^/]+)", create_branch),
    ("POST", rf"{KERNEL}/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", rf"{KERNEL}/commit/(?P<revision>[^/]+)", commit),
    ("GET", rf"{KERNEL}/tree/(?P<revision>[^/]+)(?P<folder>/.*)?", tree),
    ("POST", rf"/kernels/{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", r"/lfs/(?P<oid>\w+)", put_large_file),
    ("GET", r"/lfs/(?P<oid>\w+)", get_large_file),
    ("POST", r"/lfs/(?P<oid>\w+)/verify", verify_large_file),
    ("GET", rf"/kernels/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
]
