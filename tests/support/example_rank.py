"""A rank of an example that writes the rows of each complete epoch to a JSON file.

example_rank.py OUTPUT_FOLDER EXAMPLE ARGUMENTS…
"""

import json
import runpy
import sys
import zlib
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

SUPPORT, OUT = str(Path(__file__).parent), Path(sys.argv[1])


@contextmanager
def rows_recorded(out):
    """Write the rows of each epoch of the block, by the rank of this process."""
    from dataload import World
    from dataload.loader.loader import Loader

    epochs, original = [], Loader.batches_on

    def watched(self, *arguments):
        padding, number, batches = self.padding, self.sampler.epoch, []
        try:
            for batch in original(self, *arguments):
                batches.append([zlib.crc32(image.tobytes()) for image in batch["image"].cpu().numpy()])
                yield batch
        finally:  # Lightning closes the iterator after the last batch.
            if len(batches) == len(self):
                rows = list(chain(*batches))
                epochs.append({"of": len(self.dataset), "epoch": number, "rows": rows[: len(rows) - padding]})

    Loader.batches_on = watched
    yield
    (out / f"{World.detect().rank}.json").write_text(json.dumps(epochs))


def record_workers():
    """Record in the workers of Ray Train, which are processes of their own."""
    import ray.train.torch

    original, support, out = ray.train.torch.TorchTrainer, SUPPORT, OUT

    def trainer(loop, **options):
        def recorded(config):
            sys.path.append(support)
            sys.argv = ["", str(out)]
            from example_rank import rows_recorded

            with rows_recorded(out):
                loop(config)

        return original(recorded, **options)

    ray.train.torch.TorchTrainer = trainer


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    if Path(sys.argv[0]).name == "train_ray.py":
        record_workers()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        with rows_recorded(OUT):
            runpy.run_path(sys.argv[0], run_name="__main__")
