"""A small Hugging Face Hub: branches and commits of one dataset, and its files on another server, behind a redirect."""

from __future__ import annotations

import hashlib
import http.server
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from http_servers import serving

SMALL = 1000  # bytes of a file that git keeps itself
DATE = "2026-01-01T00:00:00.000Z"


@dataclass
class Repository:
    """A dataset on the Hub.

    Attributes:
        name: Its owner and name.
        token: That a request needs; None: none.
        endpoint: The address of the Hub.
        commits: The files of each commit, by name.
        branches: The commit of each branch.
        counts: Requests by kind: "api", "resolve", "data", and "fault" for spoilt ones.
        share: Of the requests for data, for each of the faults: an error, a body that is cut.
        signature: Of the URLs to which the Hub redirects. Earlier ones are denied.
        sent: Headers of the requests for data.
    """

    name: str = "me/set"
    token: str | None = None
    endpoint: str = ""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    share: float = 0.0
    signature: int = 0
    sent: list[dict[str, str]] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(3))

    def commit(self, branch: str = "main", **files: bytes | None) -> str:
        """Add a commit to a branch; None removes a file. In the names, "__" stands for "/". Return its number."""
        before = self.commits.get(self.branches.get(branch, ""), {})
        changed = {f"{name.replace('__', '/')}.parquet": body for name, body in files.items()}
        found = {name: body for name, body in {**before, **changed}.items() if body is not None}
        number = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[number], self.branches[branch] = found, number
        return number

    def files_at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        number = self.branches.get(revision, revision)
        return (number, self.commits[number]) if number in self.commits else None


def described(name: str, body: bytes) -> dict[str, Any]:
    """Return what the Hub says about a file."""
    git = hashlib.sha1(b"blob " + body).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": git}
    if len(body) > SMALL:
        found["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
        found["xetHash"] = hashlib.sha256(b"xet" + body).hexdigest()
    return found


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repository: Repository

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass

    def part_of(self, body: bytes, **headers: str) -> None:
        start, stop = (int(bound) for bound in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = body[start : stop + 1]
        self.answer(206, part, Content_Range=f"bytes {start}-{start + len(part) - 1}/{len(body)}", **headers)


class _Hub(_Handler):
    storage: str

    def do_GET(self) -> None:
        repository = self.repository
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self.answer(401, b"{}", X_Error_Code="GatedRepo")
            return
        path = unquote(urlsplit(self.path).path)
        name = repository.name
        if path.startswith(f"/datasets/{name}/resolve/"):
            repository.counts["resolve"] += 1
            revision, _, file = path.removeprefix(f"/datasets/{name}/resolve/").partition("/")
            self.resolve(revision, file)
            return
        repository.counts["api"] += 1
        rest = path.removeprefix(f"/api/datasets/{name}").lstrip("/")
        kind, _, rest = rest.partition("/")
        revision, _, below = rest.partition("/")
        found = repository.files_at(revision or "main")
        if found is None:
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif kind in ("", "revision"):
            self.json({"id": name, "sha": found[0], "siblings": []})
        elif kind == "tree" and (not below or any(name.startswith(f"{below}/") for name in found[1])):
            self.json(self.tree(found[1], below))
        elif kind == "tree":
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")
        else:
            self.answer(404, b"{}")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self.repository.counts["api"] += 1
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        revision = unquote(urlsplit(self.path).path).rpartition("/paths-info/")[2]
        found = self.repository.files_at(revision)
        files = found[1] if found else {}
        commit = {"id": "c0", "title": "a commit", "date": DATE}
        self.json([described(name, files[name]) | {"lastCommit": commit} for name in asked["paths"] if name in files])

    def tree(self, files: dict[str, bytes], below: str) -> list[dict[str, Any]]:
        recursive = "recursive=true" in self.path.lower()
        prefix = f"{below}/" if below else ""
        inner = {name: body for name, body in files.items() if name.startswith(prefix)}
        folders = {prefix + name.removeprefix(prefix).partition("/")[0] for name in inner if "/" in name[len(prefix) :]}
        listed = [described(name, body) for name, body in inner.items() if recursive or "/" not in name[len(prefix) :]]
        return [{"type": "directory", "path": name, "oid": "0"} for name in sorted(folders)] + listed

    def resolve(self, revision: str, file: str) -> None:
        found = self.repository.files_at(revision)
        if found is None or file not in found[1]:
            self.answer(404, b"", X_Error_Code="EntryNotFound")
            return
        commit, files = found
        body, says = files[file], described(file, files[file])
        if "lfs" not in says:
            self.part_of(body, ETag=f'"{says["oid"]}"', X_Repo_Commit=commit)
            return
        digest = says["lfs"]["oid"]
        location = f"{self.storage}/{digest}?signature={self.repository.signature}"
        tags = {"X_Linked_Etag": f'"{digest}"', "X_Xet_Hash": says["xetHash"], "X_Linked_Size": str(len(body))}
        self.answer(302, b"", Location=location, X_Repo_Commit=commit, **tags)

    def json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")


class _Storage(_Handler):
    def do_GET(self) -> None:
        repository = self.repository
        repository.counts["data"] += 1
        repository.sent.append(dict(self.headers))
        url = urlsplit(self.path)
        bodies = (body for files in repository.commits.values() for body in files.values())
        body = next((body for body in bodies if hashlib.sha256(body).hexdigest() == url.path[1:]), None)
        fault = repository.draw.random()
        if url.query != f"signature={repository.signature}" or body is None:
            self.answer(403, b"expired")
        elif fault < repository.share:
            repository.counts["fault"] += 1
            self.answer(503, b"later")
        elif fault < 2 * repository.share:
            repository.counts["fault"] += 1
            start, stop = (int(bound) for bound in self.headers["Range"].removeprefix("bytes=").split("-"))
            part = body[start : stop + 1]
            self.answer(206, part[: len(part) // 2], len(part))
            self.close_connection = True
        else:
            self.part_of(body, ETag='"of-the-storage"')


@contextmanager
def hub(token: str | None = None) -> Iterator[Repository]:
    """Serve a dataset for the duration of the block."""
    repository = Repository(token=token)
    with serving(type("Storage", (_Storage,), {"repository": repository})) as storage:
        known = {"repository": repository, "storage": storage}
        with serving(type("Hub", (_Hub,), known)) as repository.endpoint:
            yield repository
