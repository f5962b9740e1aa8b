"""What the Hub of the tests knows: repositories with their commits, uploaded files, and the faults asked for."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field

TOKEN = "hf_writes"
READ_TOKEN = "hf_reads"
# What a fault does instead of answering with a status: close the connection in the middle of the request's body, or let
# the client wait before it answers as ever.
CUT, SLOW = 0, 1
SLOW_SECONDS = 3.0


@dataclass
class Repo:
    """Files by branch; every commit keeps its own."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], title: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {title}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.titles.append(title)
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Fault:
    method: str
    path: str
    status: int
    times: int


class Hub:
    """What the server knows. One user, `me`, with a token that writes and one that only reads."""

    def __init__(self):
        self.url = ""
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def fail(self, method: str, path: str, status: int, times: int = 10**6) -> None:
        """Answers the next `times` requests of a method whose path matches with a status, `CUT` or `SLOW`."""
        self._faults.append(Fault(method, path, status, times))

    def heal(self) -> None:
        self._faults.clear()

    def take_fault(self, method: str, path: str) -> int | None:
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault.status
        return None
