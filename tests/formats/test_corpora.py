"""Files of other projects give the rows that pyarrow gives, or one DataError that names them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import corpora
import pytest

from dataload.errors import DataError

pytestmark = pytest.mark.skipif(not corpora.ROOT.exists(), reason=f"{corpora.ROOT} has the files")

STREAMS = "arrow-testing/data/arrow-ipc-stream/integration"
FUZZED = "arrow-testing/data/parquet/fuzzing/clusterfuzz-testcase"
EQUAL = [
    f"{STREAMS}/0.14.1/generated_primitive.stream",  # before the continuation of 0.15
    f"{STREAMS}/0.14.1/generated_dictionary.arrow_file",  # a footer without a version
    "parquet-testing/data/int96_from_spark.parquet",
    "parquet-testing/data/map_no_value.parquet",
]
REFUSED = {
    f"{STREAMS}/cpp-21.0.0/generated_interval.stream": "column 'f5' has type month_interval",
    f"{STREAMS}/0.17.1/generated_union.stream": "columns would be called 'sparse'",
    f"{FUZZED}-dictbitwidth-4680774947569664": "footer that cannot be read",
    f"{FUZZED}-5913005913407488": "footer that cannot be read",
    f"{FUZZED}-minimized-parquet-arrow-fuzz-4705426173394944": "a list of Thrift's type 4",
    f"{FUZZED}-minimized-parquet-arrow-fuzz-4787906620489728": "footer that cannot be read",
    f"{FUZZED}-minimized-parquet-arrow-fuzz-5697144926502912.fuzz": "footer that cannot be read",
    f"{FUZZED}-minimized-parquet-arrow-fuzz-6539993600884736": "footer that cannot be read",
}


@pytest.mark.parametrize("file", EQUAL)
def test_a_file_of_another_project_has_the_rows_of_pyarrow(file: str) -> None:
    path = str(corpora.ROOT / file)
    assert list(map(repr, corpora.by_dataload(path, False))) == list(map(repr, corpora.by_arrow(path)))


@pytest.mark.parametrize("file", REFUSED)
def test_a_damaged_file_of_another_project_is_an_error_that_names_it(file: str) -> None:
    with pytest.raises(DataError) as error:
        list(corpora.by_dataload(str(corpora.ROOT / file), False))
    assert Path(file).name in str(error.value)
    assert REFUSED[file] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_file_of_other_projects_ends_well() -> None:
    """As `make corpora`."""
    path = os.pathsep.join(sys.path)
    assert not subprocess.run([sys.executable, corpora.__file__], env={**os.environ, "PYTHONPATH": path}).returncode
