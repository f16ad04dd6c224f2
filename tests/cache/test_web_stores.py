"""Web servers and the Hugging Face Hub: each byte once, versions, commits, faults, redirects and tokens."""

from __future__ import annotations

import hashlib
import http.server
import io
import pickle
import random
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attempts import fail_at_once
from http_servers import serving
from hub import Repository, hub

from dataload import make_dataset, make_loader
from dataload.cache.blocks.reader import Object
from dataload.cache.origin.engine import engine_for
from dataload.cache.origin.http_engine import Hub
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.errors import ObjectChanged, OriginError, OriginNotFound

ROWS, GROUP, FILES = 20_000, 5_000, 3


def content(number: int, add: int = 0) -> bytes:
    """Return a file whose size does not depend on `add`."""
    written = io.BytesIO()
    values = np.arange(ROWS) + number * ROWS + add
    table = pa.table({"n": values, "x": np.random.default_rng(number).random(ROWS)})
    pq.write_table(table, written, row_group_size=GROUP, use_dictionary=False, compression="none")
    return written.getvalue()


def rows_of(loader: Any) -> list[int]:
    return sorted(int(value) for batch in loader for value in batch["n"])


def check_two_epochs(loader: Any, size: int) -> None:
    for epoch in range(2):
        assert rows_of(loader) == list(range(FILES * ROWS))
        stats = loader.stats()
        if epoch == 0:
            assert 0.97 * size < stats.bytes_origin <= size
        else:
            assert (stats.bytes_origin, stats.requests_origin) == (0, 0)
    assert loader.dataset.blocks.stats()["engine"] == "http"


# Web servers


@dataclass
class Site:
    """The files of a web server, and what it does with requests.

    Attributes:
        files: Body and time of modification, by path.
        tags: How it names versions: "strong", "weak", "times" or "none".
        heeds: Whether it heeds conditions.
        rejects: The status with which it rejects conditions; None: it does not.
        share: Of the requests with a range, for each of two faults.
        seen: Headers of each GET, in lower case.
        elsewhere: To which it redirects; None: it does not.
    """

    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    tags: str = "strong"
    heeds: bool = True
    rejects: int | None = None
    share: float = 0.0
    seen: list[dict[str, str]] = field(default_factory=list)
    elsewhere: str | None = None
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    connections: Counter[Any] = field(default_factory=Counter)
    mutex: Any = field(default_factory=threading.Lock)


class _Site(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        site = self.site
        asked = {name.lower(): text for name, text in self.headers.items()}
        if self.command == "GET":
            site.seen.append(asked)
            site.connections[self.client_address] += 1
        if site.elsewhere is not None:
            self.reply(302, b"", Location=site.elsewhere + self.path)
            return
        path = self.path.partition("?")[0]
        if path not in site.files:
            self.reply(404, b"")
            return
        body, time = site.files[path]
        tag = f'"{hashlib.md5(body).hexdigest()}"'
        versions = {"strong": {"ETag": tag}, "weak": {"ETag": f"W/{tag}"}, "none": {}, "times": {}}[site.tags]
        if site.tags != "none":
            versions["Last-Modified"] = formatdate(time, usegmt=True)
        conditions = asked.keys() & {"if-match", "if-unmodified-since"}
        if conditions and site.rejects:
            self.reply(site.rejects, b"")
            return
        since = asked.get("if-unmodified-since")
        is_other = asked.get("if-match", tag) != tag or (since and parsedate_to_datetime(since).timestamp() < time)
        if site.heeds and is_other:
            self.reply(412, b"")
            return
        if "range" not in asked:
            self.reply(200, body, **versions)
            return
        start, stop = (int(bound) for bound in asked["range"].removeprefix("bytes=").split("-"))
        part = body[start : stop + 1]
        place = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(body)}"}
        with site.mutex:
            fault = site.draw.random()
        if fault < site.share:
            self.reply(503, b"")
        elif fault < 2 * site.share:
            self.reply(206, part[: len(part) // 2], len(part), **versions, **place)
            self.close_connection = True
        else:
            self.reply(206, part, **versions, **place)

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def site_of(**how: Any) -> Iterator[tuple[str, Site]]:
    site = Site(**how)
    site.files |= {f"/train/{number}.parquet": (content(number), 1_700_000_000) for number in range(FILES)}
    with serving(type("Handler", (_Site,), {"site": site})) as url:
        yield url, site


def urls(url: str) -> list[str]:
    return [f"{url}/train/{number}.parquet" for number in range(FILES)]


@pytest.mark.parametrize("tags", ["strong", "weak", "times"])
def test_two_epochs_over_http_take_each_byte_once(tmp_path: Path, tags: str) -> None:
    with site_of(tags=tags) as (url, site):
        loader = make_loader(urls(url), 1000, cache_dir=str(tmp_path))
        check_two_epochs(loader, sum(len(body) for body, _ in site.files.values()))
        ranges = [asked for asked in site.seen if "range" in asked]
        name = {"strong": "if-match", "weak": None, "times": "if-unmodified-since"}[tags]
        assert all(name is None or name in asked for asked in ranges)


def test_connections_are_used_again() -> None:
    with site_of() as (url, site):
        origin = Origin(fsspec.filesystem("http", skip_instance_cache=True))
        [path, *_] = urls(url)
        version = version_of(origin.info(path))
        site.connections.clear()
        for start in range(20):
            assert bytes(origin.read(path, start, start + 4, version)) == content(0)[start : start + 4]
        assert [*site.connections.values()] == [20]


def test_faults_over_http_change_no_row(tmp_path: Path) -> None:
    with site_of(share=0.05) as (url, _):
        assert rows_of(make_loader(urls(url), 1000, cache_dir=str(tmp_path))) == list(range(FILES * ROWS))


@pytest.mark.parametrize("tags", ["strong", "weak", "times"])
@pytest.mark.parametrize("how", [{}, {"heeds": False}, {"rejects": 501}], ids=["heeds", "ignores", "rejects"])
def test_a_file_over_http_that_is_replaced_raises(tmp_path: Path, tags: str, how: dict[str, Any]) -> None:
    """Its size stays."""
    with site_of(tags=tags, **how) as (url, site):
        dataset = make_dataset(urls(url), cache_dir=str(tmp_path))
        site.files["/train/2.parquet"] = content(2, add=1 << 40), 1_700_000_100
        with pytest.raises(ObjectChanged, match=r"2\.parquet.* was replaced"):
            rows_of(make_loader(dataset, 500))


def test_a_server_that_names_no_version_is_read_by_its_filesystem(tmp_path: Path) -> None:
    with site_of(tags="none") as (url, _):
        assert rows_of(make_loader(urls(url), 1000, cache_dir=str(tmp_path))) == list(range(FILES * ROWS))


def test_a_redirect_takes_no_header_along(tmp_path: Path) -> None:
    with site_of() as (far, there), site_of(elsewhere=far) as (near, here):
        options = {"headers": {"X-Key": "secret"}, "client_kwargs": {"headers": {"Authorization": "Basic secret"}}}
        loader = make_loader(urls(near), 1000, storage_options=options, cache_dir=str(tmp_path))
        assert rows_of(loader) == list(range(FILES * ROWS))
        assert loader.dataset.blocks.stats()["engine"] == "http"
        assert all({"x-key", "authorization"} <= asked.keys() for asked in here.seen)
        assert not any({"x-key", "authorization"} & asked.keys() for asked in there.seen)


def test_a_redirect_to_no_url_is_an_error_that_says_so() -> None:
    with site_of(elsewhere="http://127.0.0.1:99999") as (url, _), pytest.raises(OriginError, match="to what is no URL"):
        make_loader(urls(url), 1000, cache=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"client_kwargs": {"trust_env": True}}, "the filesystem was given trust_env in client_kwargs"),
        ({"proxy": "http://127.0.0.1:9"}, "the filesystem was given proxy"),
        ({"ssl": False}, "the filesystem was given ssl"),
    ],
)
def test_an_option_of_http_without_an_equal_is_left_to_the_filesystem(options: dict[str, Any], reason: str) -> None:
    engine = engine_for(fsspec.filesystem("http", skip_instance_cache=True, **options), "auto")
    assert (engine.name, engine.reason) == ("fsspec", reason)


def test_a_body_over_http_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes long before the time between two bytes is over."""
    fail_at_once(monkeypatch)

    class Trickling(_Site):
        site = Site()

        def do_GET(self) -> None:
            self.send_response(206 if self.headers.get("Range") else 200)
            self.send_header("Content-Length", "100")
            self.send_header("ETag", '"one"')
            self.end_headers()
            if self.command == "GET":
                for _ in range(100):
                    self.wfile.write(b"x")
                    if ended.wait(0.05):
                        return

        do_HEAD = do_GET  # noqa: N815

    ended = threading.Event()
    with serving(Trickling) as url:
        engine = engine_for(fsspec.filesystem("http", skip_instance_cache=True), "auto")
        with pytest.raises(TimeoutError):
            list(engine.parts(f"{url}/x", 0, 100, '"one"', 0.2))
        ended.set()


def test_a_signed_url_is_read_with_its_query(tmp_path: Path) -> None:
    with site_of() as (url, site):
        signed = [f"{each}?X-Amz-Signature=a%2Fb&X-Amz-Date=1" for each in urls(url)]
        loader = make_loader(signed, 1000, cache_dir=str(tmp_path))
        assert rows_of(loader) == list(range(FILES * ROWS))
        assert loader.dataset.blocks.stats()["engine"] == "http"
        assert len(site.seen) > 0


# The Hugging Face Hub


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    with hub() as found:
        found.commit(**{f"data__{number}": content(number) for number in range(FILES)}, readme=None)
        yield found
        fsspec.get_filesystem_class("hf").clear_instance_cache()


def options_of(repository: Repository) -> dict[str, Any]:
    return {"endpoint": repository.endpoint}


def test_two_epochs_from_the_hub_take_each_byte_once(repository: Repository, tmp_path: Path) -> None:
    files = repository.files_at("main")
    assert files is not None
    options = options_of(repository)
    loader = make_loader("hf://datasets/me/set", 1000, storage_options=options, cache_dir=str(tmp_path))
    check_two_epochs(loader, sum(map(len, files[1].values())))
    # Each process resolves each file once: this one for the footers, and the background decoder.
    assert FILES <= repository.counts["resolve"] <= 2 * FILES
    assert repository.counts["data"] > repository.counts["resolve"]


def test_an_epoch_stays_at_its_commit(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch moves after the listing: a file is replaced, one is removed, and one comes.

    No process knows where the Hub has the bytes of the earlier files.
    """
    monkeypatch.setattr(Hub, "_remember", lambda *_: None)
    options = options_of(repository)
    dataset = make_dataset("hf://datasets/me/set@main/data", storage_options=options, cache_dir=str(tmp_path))
    repository.commit(data__2=content(2, add=1 << 40), data__0=None, data__9=content(9))
    assert rows_of(make_loader(dataset, 1000)) == list(range(FILES * ROWS))
    now = make_dataset("hf://datasets/me/set/data", storage_options=options, cache_dir=str(tmp_path))
    assert now.fingerprint != dataset.fingerprint
    assert rows_of(make_loader(now, 1000))[: 2 * ROWS] == [*range(ROWS, 2 * ROWS), *range(9 * ROWS, 10 * ROWS)]


def test_a_commit_that_changes_other_files_costs_no_byte(repository: Repository, tmp_path: Path) -> None:
    options = options_of(repository)

    def opened() -> Any:
        return make_dataset("hf://datasets/me/set/data", storage_options=options, cache_dir=str(tmp_path))

    before = opened()
    rows_of(make_loader(before, 1000))
    repository.commit(other=b"x")
    repository.counts.clear()
    after = opened()
    assert rows_of(make_loader(after, 1000)) == list(range(FILES * ROWS))
    assert (repository.counts["data"], after.fingerprint) == (0, before.fingerprint)


def test_branches_and_commits_that_are_named(repository: Repository, tmp_path: Path) -> None:
    first = repository.branches["main"]
    repository.commit("other", data__7=content(7))
    options = options_of(repository)
    for revision, rows in (("other", ROWS), (first, FILES * ROWS)):
        url = f"hf://datasets/me/set@{revision}"
        assert len(make_dataset(url, storage_options=options, cache_dir=str(tmp_path))) == rows


def test_faults_of_the_hub_change_no_row(repository: Repository, tmp_path: Path) -> None:
    repository.share = 0.05
    options = options_of(repository)
    loader = make_loader("hf://datasets/me/set", 1000, storage_options=options, cache_dir=str(tmp_path))
    assert rows_of(loader) == list(range(FILES * ROWS))


def test_an_expired_redirect_is_resolved_again(repository: Repository) -> None:
    origin = Origin(fsspec.filesystem("hf", **options_of(repository), skip_instance_cache=True))
    path = "datasets/me/set/data/0.parquet"
    version = version_of(origin.list(path)[path])
    for signature in range(3):
        repository.signature = signature
        assert bytes(origin.read(path, 0, 4, version)) == b"PAR1"
    assert repository.counts["resolve"] == 3


def test_a_file_of_a_branch_that_is_replaced_raises(repository: Repository) -> None:
    """Whoever reads a branch without a commit, as through the filesystem, is told."""
    origin = Origin(fsspec.filesystem("hf", **options_of(repository), skip_instance_cache=True))
    path = "datasets/me/set/data/0.parquet"
    version = version_of(origin.list(path)[path])
    repository.commit(data__0=content(0, add=1))
    with pytest.raises(ObjectChanged, match=r"0\.parquet"):
        origin.read(path, 0, 4, version)
    repository.commit(data__0=None)
    with pytest.raises(OriginNotFound, match=r"0\.parquet"):
        origin.read(path, 0, 4, version)


def test_a_token_goes_to_the_hub_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with caplog.at_level("DEBUG"), hub(token="hf_secret") as repository:
        repository.commit(**{f"data__{number}": content(number) for number in range(FILES)})
        loader = make_loader(
            "hf://datasets/me/set", 1000, storage_options=options_of(repository), cache_dir=str(tmp_path)
        )
        assert rows_of(loader) == list(range(FILES * ROWS))
        assert not any("Authorization" in headers for headers in repository.sent)
        repository.token = "hf_other"
        fail_at_once(monkeypatch)
        fsspec.get_filesystem_class("hf").clear_instance_cache()
        with pytest.raises(OriginError) as raised:
            make_dataset("hf://datasets/me/set", storage_options=options_of(repository), cache_dir=str(tmp_path))
    assert "hf_secret" not in caplog.text + "".join(traceback.format_exception(raised.value))
    found = [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    assert found == []
    assert b"hf_secret" not in pickle.dumps(loader.dataset.blocks.origin), "each process finds it by itself"


def test_a_commit_is_no_part_of_what_names_a_file() -> None:
    commit = "1" * 40
    for path in ("datasets/me/set/data/0.parquet", "spaces/me/set/x"):
        at = path.replace("me/set", f"me/set@{commit}")
        assert Object(at, 1, "v").stable_path == path
    for path in (f"bucket/me/set@{commit}/x", "datasets/me/set@main/x", f"datasets/me/set@{commit}0/x"):
        assert Object(path, 1, "v").stable_path == path
