"""A rank of an example that writes the rows of each complete epoch to a JSON file.

example_rank.py OUTPUT_FOLDER EXAMPLE ARGUMENTS…
"""

import json
import runpy
import sys
import zlib
from itertools import chain
from pathlib import Path

from dataload import World
from dataload.loader.loader import Loader

out = Path(sys.argv[1])
epochs = []
original = Loader.__iter__


def watched(self):
    padding, number, batches = self.padding, self.sampler.epoch, []
    try:
        for batch in original(self):
            batches.append([zlib.crc32(image.tobytes()) for image in batch["image"].cpu().numpy()])
            yield batch
    finally:  # Lightning closes the iterator after the last batch.
        if len(batches) == len(self):
            rows = list(chain(*batches))
            epochs.append({"of": len(self.dataset), "epoch": number, "rows": rows[: len(rows) - padding]})


Loader.__iter__ = watched
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
(out / f"{World.detect().rank}.json").write_text(json.dumps(epochs))
