"""Stores other than S3, by emulators: the whole way of a dataset, versions, faults, options and credentials."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulators
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from emulators import Emulator
from typer.testing import CliRunner

from dataload import fit, make_dataset, make_loader
from dataload.cache import reports
from dataload.cache.config import CacheConfig
from dataload.cache.origin import azure
from dataload.cache.origin.engine import engine_for
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.version import version_of
from dataload.cli.app import app
from dataload.errors import ConfigError, ObjectChanged, OriginNotFound

FILES, ROWS, GROUP = 3, 40_000, 10_000
PLACE = "bucket-of-tests"


@pytest.fixture(scope="module", params=["google", "azure"])
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    with getattr(emulators, request.param)() as running:
        running.filesystem().mkdir(PLACE)
        yield running


@pytest.fixture
def store(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emulator, named by the environment, with a folder of three files."""
    for name, value in emulator.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reports, "_reported", set())
    filesystem = emulator.filesystem()
    for number in range(FILES):
        filesystem.pipe_file(f"{PLACE}/train/{number}.parquet", content(number))
    yield emulator
    fsspec.get_filesystem_class(emulator.protocol).clear_instance_cache()


def content(number: int, add: int = 0) -> bytes:
    """Return a file whose size does not depend on `add`."""
    values = np.arange(ROWS) + number * ROWS + add
    written = io.BytesIO()
    table = pa.table({"n": values, "x": np.random.default_rng(number).random(ROWS)})
    pq.write_table(table, written, row_group_size=GROUP, use_dictionary=False, compression="none")
    return written.getvalue()


def url_of(store: Emulator, name: str = "train/") -> str:
    return f"{store.protocol}://{PLACE}/{name}"


def rows_of(loader: Any) -> list[int]:
    return sorted(int(value) for batch in loader for value in batch["n"])


def test_two_epochs_take_each_byte_once(store: Any, tmp_path: Path) -> None:
    loader = make_loader(url_of(store), 1000, cache_dir=str(tmp_path / "c"))
    size = sum(map(len, map(content, range(FILES))))
    for epoch in range(2):
        assert rows_of(loader) == list(range(FILES * ROWS))
        stats = loader.stats()
        if epoch == 0:
            assert 0.97 * size < stats.bytes_origin <= size
            assert stats.retries_origin == 0
        else:
            assert (stats.bytes_origin, stats.requests_origin) == (0, 0)
    found = loader.dataset.blocks.stats()
    assert (found["engine"], found["engine_reason"]) == ("obstore", "it uses the least CPU time")


def test_a_warmed_cache_serves_every_epoch(store: Any, tmp_path: Path) -> None:
    cache = ["--cache-dir", str(tmp_path / "c"), "--json"]
    run = CliRunner()
    plan = run.invoke(app, ["plan", url_of(store), *cache, "--batch-size", "1000"])
    assert plan.exit_code == 0, plan.output
    warmed = run.invoke(app, ["warm", url_of(store), *cache])
    assert warmed.exit_code == 0, warmed.output
    assert json.loads(warmed.stdout)["rows"] == FILES * ROWS
    loader = make_loader(url_of(store), 1000, cache_dir=str(tmp_path / "c"))
    for _ in range(2):
        assert rows_of(loader) == list(range(FILES * ROWS))
        assert (loader.stats().bytes_origin, loader.stats().requests_origin) == (0, 0)


def test_faults_change_no_row(store: Any, tmp_path: Path) -> None:
    with store.spoilt(0.05) as endpoint:
        options = store.options(endpoint)
        loader = make_loader(url_of(store), 1000, cache_dir=str(tmp_path / "c"), storage_options=options)
        for _ in range(2):
            assert rows_of(loader) == list(range(FILES * ROWS))


def test_an_object_that_is_replaced_within_an_epoch_is_an_error(store: Any, tmp_path: Path) -> None:
    """Its size stays. The cache has other files of the epoch, whose rows come first."""
    dataset = make_dataset(url_of(store), cache_dir=str(tmp_path / "c"))
    assert len(rows_of(make_loader(url_of(store, "train/0.parquet"), 500, cache_dir=str(tmp_path / "c")))) == ROWS
    store.filesystem().pipe_file(f"{PLACE}/train/{FILES - 1}.parquet", content(FILES - 1, add=1 << 40))
    with pytest.raises(ObjectChanged, match=rf"{FILES - 1}\.parquet.* was replaced"):
        rows_of(make_loader(dataset, 500, shuffle=False))


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_object_that_was_replaced_or_removed_is_told_apart(store: Any, engine: str) -> None:
    origin = Origin(store.filesystem(), engine=engine)
    path = f"{PLACE}/one.bin"
    store.filesystem().pipe_file(path, b"0123456789")
    version = version_of(origin.info(path))
    assert version == version_of(origin.list(path)[path])
    assert bytes(origin.read(path, 2, 5, version)) == b"234"
    store.filesystem().pipe_file(path, b"abcdefghij")
    with pytest.raises(ObjectChanged, match=r"one\.bin bytes 2-4|one\.bin was replaced"):
        origin.read(path, 2, 5, version)
    store.filesystem().rm_file(path)
    # Azurite compares versions before it looks whether there is a blob.
    gone = (OriginNotFound, ObjectChanged) if store.protocol == "az" else OriginNotFound
    with pytest.raises(gone, match=r"one\.bin"):
        origin.read(path, 2, 5, version)


@pytest.mark.parametrize("key", ["a b", "ü", "50%", "a+b", "a%2Fb", "a=1", "a~b"])
def test_any_name_is_read(store: Any, key: str) -> None:
    path = f"{PLACE}/{key}/x"
    store.filesystem().pipe_file(path, b"0123456789")
    origin = Origin(store.filesystem())
    assert bytes(origin.read(path, 0, 3, version_of(origin.info(path)))) == b"012"
    assert origin.engine.name == "obstore"


def test_a_run_resumes_from_its_checkpoint(store: Any, tmp_path: Path) -> None:
    def train(epochs: int, steps: int | None, folder: str | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1).double()
        loader = make_loader(url_of(store), 4000, columns=["x"], cache_dir=str(tmp_path / "c"))

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return (model(batch["x"][:, None]) ** 2).mean()

        options: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 5} if folder else {}
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        fit(model, optimizer, loader, loss, epochs=epochs, max_steps=steps, progress=False, **options)
        return torch.cat([value.ravel() for value in model.state_dict().values()])

    expected = train(1, None, None)
    folder = url_of(store, "runs/one")
    train(1, 12, folder)
    assert torch.equal(train(1, None, folder), expected)


UNTRANSLATABLE: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gs": [
        ({"requester_pays": True}, "gcsfs was given requester_pays"),
        ({"session_kwargs": {"trust_env": True}}, "gcsfs was given session_kwargs"),
    ],
    "az": [
        ({"location_mode": "secondary"}, "adlfs was given location_mode"),
        ({"unheard_of": 1}, "adlfs was given unheard_of"),
    ],
}


def test_an_option_without_an_equal_is_left_to_the_filesystem(
    store: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for given, reason in UNTRANSLATABLE[store.protocol]:
        options = {**store.options(), **given}
        dataset = make_dataset(url_of(store), storage_options=options, cache_dir=str(tmp_path))
        found = dataset.blocks.stats()
        assert (found["engine"], found["engine_reason"]) == ("fsspec", reason)
        assert reason in caplog.text
        told = ["doctor", url_of(store), "--json", "--storage-options", json.dumps(options)]
        checks = json.loads(CliRunner().invoke(app, told).stdout)["checks"]
        assert (checks["client"]["status"], reason in checks["client"]["what"]) == ("warning", True)
        with pytest.raises(ConfigError, match=reason):
            cache = CacheConfig(cache_dir=str(tmp_path), engine="obstore")
            make_dataset(url_of(store), storage_options=options, cache=cache)


def test_the_environment_changes_nothing_that_the_filesystem_was_told(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Obstore reads the environment, too."""
    names = {
        "gs": {
            "GOOGLE_BASE_URL": "http://127.0.0.1:9",
            "GOOGLE_BUCKET": "other",
            "GOOGLE_BEARER_TOKEN": "another's",
            "GOOGLE_APPLICATION_CREDENTIALS": "/no/such/file",
        },
        "az": {
            "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9",
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURE_STORAGE_SAS_KEY": "sv=1",
            "AZURE_CONTAINER_NAME": "other",
            "AZURE_SKIP_SIGNATURE": "true",
        },
    }
    filesystem = store.filesystem()
    for name, value in names[store.protocol].items():
        monkeypatch.setenv(name, value)
    origin = Origin(filesystem, engine="obstore")
    path = f"{PLACE}/train/0.parquet"
    assert bytes(origin.read(path, 0, 4, version_of(origin.info(path)))) == b"PAR1"


def test_what_obstore_rejects_in_the_environment_is_left_to_the_filesystem(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if store.protocol != "gs":
        pytest.skip("obstore rejects no variable of Azure")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/no/such/file")
    origin = Origin(store.filesystem())
    path = f"{PLACE}/train/0.parquet"
    assert bytes(origin.read(path, 0, 4, version_of(origin.info(path)))) == b"PAR1"
    assert (origin.engine.name, "/no/such/file" in caplog.text) == ("fsspec", True)


# Credentials


class Token:
    """A stand-in for Google's credentials, which have another token after each refresh."""

    def __init__(self) -> None:
        self.number, self.expiry, self.valid = 0, None, True

    @property
    def token(self) -> str:
        return f"token-{self.number}"

    def refresh(self, _: Any) -> None:
        self.number += 1

    def apply(self, headers: dict[str, str]) -> None:
        headers["authorization"] = f"Bearer {self.token}"


def test_a_rejected_access_token_is_renewed() -> None:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: its tokens are not renewed here")
    filesystem = fsspec.filesystem("gs", token="anon", skip_instance_cache=True)
    filesystem.credentials.credentials = Token()
    engine = engine_for(filesystem, "obstore")
    assert engine.credentials()["token"] == "token-0"
    assert engine.credentials.renew(0)
    assert engine.credentials()["token"] == "token-1"
    assert engine.credentials.renew(0), "another thread has renewed it"
    assert engine.credentials()["token"] == "token-1"


AZURE_KEY = emulators.KEY


def azure_filesystem(**options: Any) -> Any:
    pytest.importorskip("adlfs", reason="adlfs is not installed: its credentials are not tested here")
    return fsspec.filesystem("az", skip_instance_cache=True, **options)


class Identity:
    """A stand-in for a credential of azure.identity.aio."""

    async def get_token(self, *scopes: str) -> Any:
        assert scopes == ("https://storage.azure.com/.default",)
        return SimpleNamespace(token="a-token", expires_on=4_000_000_000)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"account_name": "a", "account_key": AZURE_KEY}, {"access_key": AZURE_KEY}),
        ({"account_name": "a", "sas_token": "?sv=1&sig=x%3D"}, {"sas_token": "sv=1&sig=x%3D"}),
        ({"connection_string": emulators.connection_string("http://h")}, {"access_key": AZURE_KEY}),
        (
            {"connection_string": "BlobEndpoint=https://a.blob.core.windows.net;SharedAccessSignature=sv=1&sig=x%3D"},
            {"sas_token": "sv=1&sig=x%3D"},
        ),
        ({"account_name": "a", "credential": Identity()}, {"token": "a-token"}),
    ],
    ids=["key", "SAS", "connection string", "connection string with SAS", "identity"],
)
def test_credentials_of_azure_are_those_of_the_filesystem(
    options: dict[str, Any], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCOUNT_KEY", "ACCOUNT_NAME", "CONNECTION_STRING", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    engine = engine_for(azure_filesystem(**options), "obstore")
    got = engine.credentials()
    assert {name: got[name] for name in found} == found


def test_a_public_container_of_azure_is_read_without_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_KEY", "CONNECTION_STRING", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    found = azure.settings(azure_filesystem(account_name="a", anon=True), "c")
    assert (found["skip_signature"], found["endpoint"]) == (True, "https://a.blob.core.windows.net")


def test_a_signature_reaches_no_error(emulator: Emulator, caplog: pytest.LogCaptureFixture) -> None:
    if emulator.protocol != "az":
        pytest.skip("only Azure has signatures in options")
    place, signed = f"{emulator.endpoint}/{emulators.ACCOUNT}", "sv=2024-01-01&sig=c2VjcmV0"
    filesystem = azure_filesystem(connection_string=f"BlobEndpoint={place};SharedAccessSignature={signed}")
    origin = Origin(filesystem, engine="obstore")
    with pytest.raises(OSError, match="denied access") as raised:
        origin.read(f"{PLACE}/x", 0, 1, '"0x1"')
    assert "c2VjcmV0" not in "".join(traceback.format_exception(raised.value)) + caplog.text
