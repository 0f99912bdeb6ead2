"""Data: made, found or fetched, checked, and cached whole or not at all."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import multiprocessing
import socket
import threading
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from workshop_utils import place
from workshop_utils.training import data
from workshop_utils.training.data import DataError, arrays, prepare


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("WORKSHOP_CACHE", str(folder))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return folder


@pytest.fixture
def folder(tmp_path):
    """Seven training and three test images of 2×3 pixels, one of the four files gzipped."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for prefix, count in (("train", 7), ("t10k", 3)):
        pixels = np.arange(count * 6, dtype=np.uint8).reshape(count, 2, 3)
        data.write_idx(folder / f"{prefix}-images-idx3-ubyte", pixels)
        data.write_idx(folder / f"{prefix}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8))
    plain = folder / "t10k-images-idx3-ubyte"
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return folder


class Server:
    """A web server on loopback that serves one folder and counts what it is asked for."""

    def __init__(self, folder):
        self.asked: list[str] = []
        self.status: int | None = None  # what to answer instead of a file
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                if outer.status is not None:
                    self.send_error(outer.status)
                else:
                    super().do_GET()

            def log_message(self, format, *args):  # noqa: A002
                return

        self.http = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server(folder):
    server = Server(folder.parent)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def url_where_nobody_listens():
    with socket.socket() as held:  # bound, so that nobody else takes the port, but not listening
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_digits_are_1500_and_297_images_whose_split_never_changes():
    folder = prepare("digits")
    train, test = place.load("train", folder), place.load("test", folder)
    assert (train.count, test.count) == (1500, 297)
    assert (train.height, train.width) == (8, 8)
    assert (min(train.images), max(train.images)) == (0, 255)
    sums = [hashlib.sha256((folder / name).read_bytes()).hexdigest()[:12] for name in data.FILES]
    assert sums == ["780e24592411", "d09cc52a2e6c", "15f9147307f5", "93afce40a245"]


def cut_short(folder, name, nbytes):
    (folder / name).write_bytes((folder / name).read_bytes()[:-nbytes])


def write(folder, name, shape, value=0):
    data.write_idx(folder / name, np.full(shape, value, np.uint8))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "train-labels-idx1-ubyte").unlink(), "train-labels-idx1-ubyte not found"),
        (lambda folder: cut_short(folder, "train-images-idx3-ubyte", 1), "idx3-ubyte claims 42 bytes"),
        (lambda folder: cut_short(folder, "t10k-images-idx3-ubyte.gz", 9), "data is .*are needed"),
        (lambda folder: (folder / "train-images-idx3-ubyte").write_text("<html>"), "is not an idx file"),
        (lambda folder: write(folder, "t10k-labels-idx1-ubyte", (3,), 10), "a test label is 10; labels must be 0 to 9"),
        (
            lambda folder: [
                write(folder, "train-images-idx3-ubyte", (0, 2, 3)), write(folder, "train-labels-idx1-ubyte", (0,))
            ],
            "its train set is empty",
        ),
        (lambda folder: write(folder, "train-images-idx3-ubyte", (7, 4, 4)), r"\(4, 4\) and test images \(2, 3\)"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_trained_on_is_refused_in_words(folder, damage, said):
    damage(folder)
    with pytest.raises(DataError, match=said):
        prepare(str(folder))


def test_a_url_is_downloaded_once(folder, server):
    fetched = prepare(f"{server.url}/mine")
    assert place.load("train", fetched) == place.load("train", folder)
    assert place.load("test", fetched) == place.load("test", folder)
    asked = len(server.asked)
    assert prepare(f"{server.url}/mine/") == fetched
    assert len(server.asked) == asked


def test_a_server_that_fails_or_lacks_a_file_is_named_with_its_answer(server):
    with pytest.raises(DataError, match="train-images-idx3-ubyte is not there"):
        prepare(f"{server.url}/elsewhere")
    server.status = 503
    with pytest.raises(DataError, match=f"{server.url}.* answered 503"):
        prepare(f"{server.url}/mine")


def test_a_server_that_is_not_there_cannot_be_reached_and_mnist_says_what_to_use_instead(
    url_where_nobody_listens, monkeypatch
):
    with pytest.raises(DataError, match=f"{url_where_nobody_listens}.* cannot be reached"):
        prepare(f"{url_where_nobody_listens}/mine")
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"{url_where_nobody_listens}/mine/",))
    with pytest.raises(DataError, match=r"cannot be reached.*Offline, use data: digits"):
        prepare("mnist")


def test_mnist_is_taken_from_the_second_mirror_when_the_first_fails(folder, server, monkeypatch):
    md5 = []
    for name in data.FILES:
        path = folder / f"{name}.gz"
        if not path.exists():
            path.write_bytes(gzip.compress((folder / name).read_bytes()))
        md5.append(hashlib.md5(path.read_bytes()).hexdigest())
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"{server.url}/gone/", f"{server.url}/mine/"))
    monkeypatch.setattr(data, "MNIST_MD5", tuple(md5))
    assert place.load("train", prepare("mnist")) == place.load("train", folder)
    asked = len(server.asked)
    prepare("mnist")
    assert len(server.asked) == asked


def test_mnist_with_a_wrong_checksum_is_refused_and_not_kept(folder, server, cache, monkeypatch):
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"not MNIST")
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"{server.url}/mine/",))
    with pytest.raises(DataError, match=r"data is 'mnist'.*does not have its published checksum"):
        prepare("mnist")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_an_s3_prefix_is_downloaded_and_one_without_the_files_named(folder, monkeypatch):
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="digits-for-all")
        for path in folder.iterdir():
            client.upload_file(str(path), "digits-for-all", f"deep/mine/{path.name}")
        fetched = prepare("s3://digits-for-all/deep/mine")
        assert place.load("train", fetched) == place.load("train", folder)
        with pytest.raises(DataError, match="train-images-idx3-ubyte is not there"):
            prepare("s3://digits-for-all/deep")
        with pytest.raises(DataError, match="data is 's3://no-such-bucket-here/x'"):
            prepare("s3://no-such-bucket-here/x")


def test_a_cache_of_which_a_file_is_gone_is_made_again(cache):
    folder = prepare("digits")
    (folder / "train-images-idx3-ubyte").unlink()
    assert prepare("digits") == folder
    assert arrays(folder).train_images.shape == (1500, 64)
    assert [path.name for path in cache.iterdir()] == ["digits"]


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be written.*set WORKSHOP_CACHE"):
        prepare("digits")


def test_two_processes_at_once_prepare_one_folder(cache):
    spawned = multiprocessing.get_context("spawn")
    together = spawned.Barrier(2)
    with ProcessPoolExecutor(2, spawned, initializer=together.wait) as pool:
        folders = list(pool.map(prepare, ["digits"] * 2))
    assert folders == [cache / "digits"] * 2
    assert place.load("train", folders[0]).count == 1500
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["digits"]
