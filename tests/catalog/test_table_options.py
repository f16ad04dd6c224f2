"""Options of stores that tables bring, in the words of fsspec, and back."""

from __future__ import annotations

import pytest

from dataload.catalog.table_options import of_delta, of_iceberg, to_delta, to_iceberg


@pytest.mark.parametrize(
    ("url", "given", "expected"),
    [
        ("s3://b/t", {"AWS_ACCESS_KEY_ID": "k", "aws_secret_access_key": "s"}, {"key": "k", "secret": "s"}),
        ("s3a://b/t", {"aws_endpoint_url_s3": "a", "aws_endpoint_url": "b"}, {"endpoint_url": "a"}),
        ("s3://b/t", {"AWS_REGION": "r", "AWS_PROFILE": "p"}, {"client_kwargs": {"region_name": "r"}, "profile": "p"}),
        ("s3://b/t", {"skip_signature": "false", "timeout": "3s"}, {"anon": False}),
        ("gs://b/t", {"GOOGLE_SERVICE_ACCOUNT": "/key.json"}, {"token": "/key.json"}),
        ("gs://b/t", {"google_service_account_key": '{"type": "x"}'}, {"token": {"type": "x"}}),
        (
            "abfss://c@a.dfs.core.windows.net/t",
            {"azure_storage_account_name": "a", "azure_storage_sas_token": "t"},
            {"account_name": "a", "sas_token": "t"},
        ),
        ("/a/folder", {"AWS_ACCESS_KEY_ID": "k"}, {}),
    ],
)
def test_options_of_deltalake(url, given, expected):
    assert of_delta(url, given) == expected


@pytest.mark.parametrize(
    ("url", "given", "expected"),
    [
        ("s3://b/t", {"client.access-key-id": "c", "s3.access-key-id": "k"}, {"key": "k"}),
        ("s3://b/t", {"s3.session-token": "vended", "s3.anonymous": "True"}, {"token": "vended", "anon": True}),
        ("s3://b/t", {"client.region": "r"}, {"client_kwargs": {"region_name": "r"}}),
        ("gs://b/t", {"gcs.oauth2.token": "t", "gcs.project-id": "p"}, {"token": "t", "project": "p"}),
        (
            "abfss://c@a.dfs.core.windows.net/t",
            {"adls.sas-token.a.dfs.core.windows.net": "t"},
            {"account_name": "a", "sas_token": "t"},
        ),
        ("abfss://c@a.dfs.core.windows.net/t", {"adls.connection-string": "x"}, {"connection_string": "x"}),
    ],
)
def test_properties_of_pyiceberg(url, given, expected):
    assert of_iceberg(url, given) == expected


def test_the_credentials_of_a_catalog_go_to_no_store():
    catalog = {"token": "bearer", "credential": "id:secret", "access-key-id": "k"}
    assert of_iceberg("s3://b/t", catalog) == of_iceberg("gs://b/t", catalog) == {}


def test_options_of_fsspec_reach_the_libraries_of_tables():
    given = {"key": "k", "secret": "s", "anon": "False", "client_kwargs": {"endpoint_url": "http://h", "other": 1}}
    assert to_delta("s3://b/t", given) == {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SKIP_SIGNATURE": "false",
        "AWS_ENDPOINT_URL": "http://h",
        "AWS_ALLOW_HTTP": "true",
    }
    assert to_iceberg(given)["s3.endpoint"] == "http://h"
    assert to_delta("gs://b/t", {"token": "/key.json"}) == {"google_service_account": "/key.json"}
    assert to_delta("gs://b/t", {"token": {"type": "x"}}) == {"google_service_account_key": '{"type": "x"}'}
    assert to_delta("az://c/t", {"account_name": "a"}) == {"account_name": "a"}
