"""A Hub for tests: speaks as much of the Hugging Face Hub's protocol over HTTP as the real client needs, from memory.

Uploads (create, preupload, LFS, commit), downloads (info, tree, resolve) and card validation. Faults are asked for by
`Hub.fail` (`tests.hub_state`). See `tests.hub_client` for how a client is pointed here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.hub_cards import card_faults
from tests.hub_state import CUT, READ_TOKEN, SLOW, SLOW_SECONDS, TOKEN, Hub, Repo

LFS_SUFFIXES = (".safetensors", ".png", ".bin")


@contextmanager
def serving() -> Iterator[Hub]:
    """A running Hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def blob_oid(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<rev>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)", "commit"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>\w+)", "lfs_put"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+?)(/revision/(?P<rev>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)(/.*)?", "tree"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *_):
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        fault = self.hub.take_fault(self.command, path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault == CUT:
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        self.body = self._read_body(length)
        if fault == SLOW:
            time.sleep(SLOW_SECONDS)
        elif fault is not None:
            return self._fail(fault, f"injected {fault}")
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command.replace("HEAD", "GET") == method:
                values = {key: unquote(value) for key, value in match.groupdict().items() if value}
                if "repo" in values and not self._may_use(values["repo"], method):
                    return None
                return getattr(self, f"_{name}")(**values)
        return self._fail(404, f"no route {self.command} {path}")

    def _read_body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, value, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, message: str, code: str = "") -> None:
        self._send({"error": message}, status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}))

    # Who may do what

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _writes(self) -> bool:
        if self._token() == TOKEN:
            return True
        if self._token() == READ_TOKEN:
            self._fail(403, "this token cannot write")
        else:
            self._fail(401, "Invalid credentials in Authorization header")
        return False

    def _may_use(self, name: str, method: str) -> bool:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self._token() not in (TOKEN, READ_TOKEN)):
            self._fail(401 if repo else 404, "Repository not found", "RepoNotFound")
            return False
        return method == "GET" or self._writes()

    # Accounts and repositories

    def _whoami(self) -> None:
        if self._token() not in (TOKEN, READ_TOKEN):
            return self._fail(401, "Invalid credentials in Authorization header")
        return self._send({"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def _create(self) -> None:
        if not self._writes():
            return
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        answer = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repos:
            return self._send(answer | {"error": "You already created this model repo"}, 409)
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.hub.repos[name] = Repo(private)
        self.hub.repos[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return self._send(answer)

    def _branch(self, repo: str, rev: str) -> None:
        known = self.hub.repos[repo]
        if rev in known.branches:
            return self._fail(409, "branch exists")
        known.branches[rev] = known.branches["main"]
        return self._send({})

    def _validate_yaml(self) -> None:
        errors = card_faults(json.loads(self.body)["content"])
        found = [{"message": error} for error in errors]
        self._send({"errors": found, "warnings": []}, 400 if errors else 200)

    def _files(self, repo: str, rev: str) -> dict[str, bytes] | None:
        known = self.hub.repos[repo]
        if rev not in known.branches and rev not in known.commits:
            self._fail(404, "Revision not found", "RevisionNotFound")
            return None
        return known.files(rev)

    # Uploads

    def _preupload(self, repo: str, rev: str) -> None:
        held = self._files(repo, rev)
        if held is None:
            return
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_lfs(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": _oid(file["path"], held[file["path"]]) if file["path"] in held else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._send({"files": answers})

    def _lfs_batch(self, repo: str) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.lfs:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        self._send({"transfer": "basic", "objects": objects})

    def _lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._fail(400, "content does not match its hash")
        self.hub.lfs[oid] = self.body
        return self._send(b"")

    def _commit(self, repo: str, rev: str) -> None:
        held = self._files(repo, rev)
        if held is None:
            return
        files, title = dict(held), ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        sha = self.hub.repos[repo].commit(rev, files, title)
        self._send({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    # Downloads

    def _info(self, repo: str, rev: str = "main") -> None:
        files, known = self._files(repo, rev), self.hub.repos[repo]
        if files is not None:
            siblings = [{"rfilename": path} for path in files]
            sha = known.branches.get(rev, rev)
            self._send({"id": repo, "sha": sha, "private": known.private, "siblings": siblings, "tags": []})

    def _tree(self, repo: str, rev: str) -> None:
        files = self._files(repo, rev)
        if files is not None:
            self._send([_tree_entry(path, content) for path, content in files.items()])

    def _resolve(self, repo: str, rev: str, path: str) -> None:
        files = self._files(repo, rev)
        if files is None:
            return
        if path not in files:
            return self._fail(404, "Entry not found", "EntryNotFound")
        sha = self.hub.repos[repo].branches.get(rev, rev)
        return self._send(files[path], headers={"ETag": f'"{_oid(path, files[path])}"', "X-Repo-Commit": sha})


def _oid(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_lfs(path) else blob_oid(content)


def _tree_entry(path: str, content: bytes) -> dict:
    entry = {"type": "file", "path": path, "size": len(content), "oid": blob_oid(content)}
    if is_lfs(path):
        entry["lfs"] = {"oid": _oid(path, content), "size": len(content), "pointerSize": 134}
    return entry
