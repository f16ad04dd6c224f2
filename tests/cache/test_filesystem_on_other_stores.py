"""The filesystem on S3 servers of other projects, beside moto: its own tests that count no requests, and fsspec's."""

from __future__ import annotations

from typing import Any

import pytest
import test_filesystem as on_moto
from botocore.exceptions import ClientError
from fsspec.tests.abstract import AbstractGetTests, AbstractOpenTests
from other_stores import by_condition, other_bucket, other_server  # noqa: F401 (fixtures)
from test_abstract_filesystem import OverS3
from test_filesystem import fs  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

# What docs/recipes.md says: the status of a request whose condition does not hold, or whose checksum is wrong.
ANSWERS = {
    "seaweedfs": {"read If-Match": 412, "write If-None-Match": 412, "end of parts If-None-Match": 412, "checksum": 400},
    "rclone": {"read If-Match": 200, "write If-None-Match": 200, "end of parts If-None-Match": 200, "checksum": 200},
}


test_any_range_is_right = on_moto.test_any_range_is_right
test_a_file_reads_seeks_and_ends = on_moto.test_a_file_reads_seeks_and_ends
test_listing = on_moto.test_listing
test_text_mode = on_moto.test_text_mode
test_a_folder_is_not_opened = on_moto.test_a_folder_is_not_opened
test_a_missing_object_and_a_missing_bucket = on_moto.test_a_missing_object_and_a_missing_bucket


@pytest.mark.usefixtures("by_condition")
class TestReplaced:
    """Objects that are replaced while they are read."""

    test_mid_read = staticmethod(on_moto.test_an_object_replaced_mid_read)
    test_then_opened = staticmethod(on_moto.test_after_a_change_the_next_open_reads_the_new_version)
    test_then_listed = staticmethod(on_moto.test_after_a_change_a_listing_has_the_new_version)


class TestOpen(OverS3, AbstractOpenTests):
    pass


class TestGet(OverS3, AbstractGetTests):
    pass


def status_of(request: Any, **arguments: Any) -> int:
    try:
        answer = request(**arguments)
    except ClientError as error:
        answer = error.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def test_what_the_store_does_with_conditions_and_checksums(bucket: Any, request: pytest.FixtureRequest) -> None:
    client, at = bucket.client, {"Bucket": bucket.name, "Key": "object"}
    bucket.put("object", b"old")
    upload = {**at, "UploadId": client.create_multipart_upload(**at)["UploadId"]}
    tag = client.upload_part(**upload, PartNumber=1, Body=b"new")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    found = {
        "read If-Match": status_of(client.get_object, **at, IfMatch='"another"'),
        "write If-None-Match": status_of(client.put_object, **at, Body=b"new", IfNoneMatch="*"),
        "end of parts If-None-Match": status_of(
            client.complete_multipart_upload, **upload, MultipartUpload=parts, IfNoneMatch="*"
        ),
        "checksum": status_of(client.put_object, **at, Body=b"new", ChecksumCRC32="AAAAAA=="),
    }
    assert found == ANSWERS[request.node.callspec.params["server"]]
