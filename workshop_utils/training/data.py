"""What jobs train on: the scanned digits, as the four idx files of MNIST, or any folder or file.

    folder = prepare("digits")       # also "mnist", a folder, a file
    data = arrays(folder)            # NumPy views for the lessons; training scripts use place.load instead

What had to be made or fetched is kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from workshop_utils import idx
from workshop_utils.cache import cache_folder, unwritable
from workshop_utils.jobs import PlainError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
FILES = tuple(f"{split}-{kind}" for split in ("train", "t10k") for kind in KINDS)
NAMED = ("digits", "mnist")  # sources that are names, not paths: everybody finds the same there

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# As published with the data (LeCun et al. 1998), in the order of FILES, each of the gzipped file.
MNIST_MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)

DIGITS_IN_TRAIN = 1500  # of scikit-learn's 1,797; the other 297 are the test set
SOURCES = "'digits', 'mnist', a folder or a file"


class DataError(PlainError, ValueError):
    """The field `data` names nothing that can be trained on; the message says what would be right."""

    def __init__(self, source: str, reason: str, field: str = "data") -> None:
        super().__init__(f"{field} is {source!r}: {reason}")
        self.reason = reason


def prepare(source: str) -> Path:
    """A folder that holds `source`, made or downloaded where it is not there yet.

    `source` is "digits" (scikit-learn's, 8×8 pixels scaled to 0–255, 1,500 to train and 297 to test), "mnist"
    (28×28, 60,000 and 10,000), a folder with anything in it (used in place), or a file (which gets a folder with a link
    to it). Made and downloaded folders appear whole or not at all, so several processes may prepare the same source at
    once.

    Raises:
        DataError: if the data cannot be had.
    """
    if source in NAMED:
        return _cached(source, _write_digits if source == "digits" else _download)
    refuse_address(source)
    path = Path(source).expanduser().absolute()
    if path.is_file():
        return _linked({path.name: path})
    if not source or not path.is_dir():
        raise DataError(source, f"there is no {path}; it must be {SOURCES}")
    return path


def prepare_all(data: str | Mapping[str, str]) -> Path:
    """What WORKSHOP_DATA names for a job's `data`: the folder of its one source, or one with a folder for each channel.

    Raises:
        DataError: as `prepare` does; it names the channel.
    """
    if isinstance(data, str):
        return prepare(data)
    folders = {}
    for channel, source in data.items():
        try:
            folders[channel] = prepare(source)
        except DataError as error:
            raise DataError(source, error.reason, f"data.{channel}") from None
    return _linked(folders)


def _linked(paths: Mapping[str, Path]) -> Path:
    """A folder of the cache that holds, by name, a link to each path; it stays, since jobs that run may use it."""
    key = hashlib.sha256("\0".join(f"{name}\0{path}" for name, path in sorted(paths.items())).encode())
    folder = cache_folder() / f"links-{key.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(path)
    except OSError as error:
        raise DataError(", ".join(map(str, paths.values())), unwritable(error)) from error
    return folder


def refuse_address(source: str) -> None:
    """Raise DataError for an address, which only SageMaker reads itself."""
    if source.startswith("s3://"):
        raise DataError(source, f"a bucket is read by SageMaker on AWS alone; here it must be {SOURCES}")
    if "://" in source:
        raise DataError(source, f"download it to a folder, and name that; it must be {SOURCES}")


@dataclass(frozen=True)
class Arrays:
    """Images as float32 in [0, 1], shape (count, height × width); labels as int64, shape (count,)."""

    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]
    height: int
    width: int


def arrays(folder: Path) -> Arrays:
    """The data in `folder`, as `prepare` returns it, as NumPy arrays. Raises as `idx.load` does."""
    train, test = (idx.load(folder, split) for split in ("train", "test"))
    return Arrays(*train.arrays(), *test.arrays(), train.height, train.width)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; where it is missing or damaged, `make(folder)` fills it."""
    folder = cache_folder() / name
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix=f".{name}.", dir=folder.parent)
    except OSError as error:
        raise DataError(name, unwritable(error)) from error
    with scratch:
        unfinished = Path(scratch.name, name)
        unfinished.mkdir()
        make(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # there is one: damaged, or made by another process meanwhile
            if not _is_whole(folder):
                with contextlib.suppress(OSError):
                    folder.rename(Path(scratch.name, "damaged"))
                    unfinished.rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether MNIST's four files are there, as `place.load` needs them."""
    try:
        return all(idx.load(folder, split).count for split in ("train", "test"))
    except (ValueError, OSError, EOFError):  # a damaged gzip file raises the last two
        return False


def _write_digits(folder: Path) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    # RandomState, not default_rng: NumPy promises its numbers for ever (NEP 19), so the split never changes.
    order = np.random.RandomState(0).permutation(len(labels))
    parts = (order[:DIGITS_IN_TRAIN], order[DIGITS_IN_TRAIN:])
    contents = [values[part] for part in parts for values in (images, labels)]
    for name, values in zip(FILES, contents, strict=True):
        write_idx(folder / name, values)


def write_idx(path: Path, values: npt.NDArray[np.uint8]) -> None:
    """Write an array of unsigned bytes, of any shape, in the format that `idx.read` reads."""
    header = b"\x00\x00\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.tobytes())


def _download(folder: Path) -> None:
    """Fetch each of MNIST's FILES from the first mirror that has it."""
    import pooch

    pooch.get_logger().setLevel("WARNING")  # it would announce every file
    for name, md5 in zip(FILES, MNIST_MD5, strict=True):
        problems = []
        for mirror in MNIST_MIRRORS:
            url = f"{mirror}{name}.gz"
            try:
                pooch.retrieve(url, f"md5:{md5}", fname=f"{name}.gz", path=folder)
                break
            except OSError as error:  # all errors of requests are
                status = getattr(getattr(error, "response", None), "status_code", None)
                what = f"answered {status}" if status else f"cannot be reached ({type(error).__name__})"
                problems.append(f"{url} {what}")
            except ValueError:
                problems.append(f"{url} does not have its published checksum")
        else:
            advice = f"Offline, use data: digits, or a folder with {', '.join(FILES)}"
            raise DataError("mnist", f"there is no {name} ({'; '.join(problems)}). {advice}")
