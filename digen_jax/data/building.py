"""TFDS datasets that appear complete or not at all, whichever processes build them at once, without its messages."""

import contextlib
import io
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import tensorflow_datasets as tfds
from absl import logging

# What folders of datasets that are being built begin with.
BUILDING = "building."


def build(
    make: Callable[[str], tfds.core.DatasetBuilder],
    final: pathlib.Path,
    cache_dir: pathlib.Path,
    finish: Callable[[pathlib.Path], None] = lambda folder: None,
) -> None:
    """Builds a dataset in array_record files and moves it to `final`, unless another process did so before.

    Args:
      make: the builder, for a folder of data.
      final: the dataset's folder, on the disk of `cache_dir`.
      cache_dir: where a folder for building is made.
      finish: called with the dataset's folder before that is moved.
    """
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=cache_dir) as private:
        builder = make(private)
        with contextlib.redirect_stdout(io.StringIO()):  # what TFDS prints
            builder.download_and_prepare(file_format="array_record")
        finish(pathlib.Path(builder.data_path))
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            builder.data_path.rename(final)
        except OSError:
            if not final.exists():
                raise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep TFDS from logging and drawing progress bars for short work.

    What is printed is not redirected, since sampling threads read while other threads print.
    """
    verbosity = logging.get_verbosity()
    tfds.disable_progress_bar()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        tfds.enable_progress_bar()
