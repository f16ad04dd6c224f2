"""Checkpoints on S3 servers of other projects, beside moto: the tests of test_store_checkpoints that need no more."""

from __future__ import annotations

import pytest
import test_store_checkpoints as on_moto
from other_stores import by_condition, other_bucket, other_server  # noqa: F401 (fixtures)
from test_store_checkpoints import _environment, data, run_url  # noqa: F401 (fixtures)

from dataload.train.checkpoint.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

test_the_latest_checkpoints_are_kept = on_moto.test_the_latest_checkpoints_are_kept
test_a_checkpoint_of_a_disk_can_be_copied = on_moto.test_a_checkpoint_of_a_disk_can_be_copied_to_a_store
test_folders_of_other_programs_stay = on_moto.test_folders_of_other_programs_stay
test_other_numbers_of_ranks_resume = on_moto.test_other_numbers_of_ranks_resume_from_a_store


@pytest.mark.usefixtures("by_condition")
class TestByCondition:
    """What takes writes that fail if there is an object."""

    test_the_newest_complete_checkpoint_loads_after_kills = staticmethod(
        on_moto.test_whatever_a_kill_interrupts_the_newest_complete_checkpoint_loads
    )
    test_a_checkpoint_without_a_manifest_is_none = staticmethod(
        on_moto.test_a_checkpoint_without_a_manifest_is_none_and_is_swept
    )
    test_two_runs_are_never_in_one_folder = staticmethod(on_moto.test_two_runs_never_save_into_one_folder)
    test_a_run_keeps_its_number = staticmethod(on_moto.test_an_owner_of_a_number_is_never_displaced)
    test_the_lease_of_a_killed_run_is_free = staticmethod(
        on_moto.test_the_lease_of_a_killed_process_of_this_host_is_taken_over_at_once
    )


def test_a_store_that_ignores_conditions_is_told(run_url, caplog, request):  # noqa: F811
    Checkpoints(run_url, 1).close()
    ignores = request.node.callspec.params["server"] == "rclone"
    assert caplog.text.count("this store ignores If-None-Match") == ignores
