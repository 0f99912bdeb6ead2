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
from pathlib import Path

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


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves one folder, counts what it is asked for, and below /busy has no time."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/busy"):
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *_):
        return


@pytest.fixture
def server(folder):
    """A web server on loopback; `url` is its address, and `asked` the paths that it was asked for."""
    handler = functools.partial(Handler, directory=str(folder.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
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


def test_any_folder_is_used_in_place_and_a_file_gets_a_folder_of_its_own_that_stays(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be")
    assert prepare(str(tmp_path)) == tmp_path
    folder = prepare(str(corpus))
    assert [path.name for path in folder.iterdir()] == ["corpus.txt"]
    corpus.write_text("or not to be")
    assert (folder / "corpus.txt").read_text() == "or not to be"
    corpus.rename(tmp_path / "renamed.txt")
    assert prepare(str(tmp_path / "renamed.txt")).is_dir()
    (tmp_path / "renamed.txt").rename(corpus)  # it was away for a moment, and a job may run on it
    assert (folder / "corpus.txt").read_text() == "or not to be"


def test_channels_are_folders_of_one_folder(tmp_path):
    (tmp_path / "words").write_text("to be")
    folder = data.prepare_all({"train": "digits", "vocab": str(tmp_path / "words")})
    assert sorted(path.name for path in folder.iterdir()) == ["train", "vocab"]
    assert place.load("train", folder / "train").count == 1500
    assert (folder / "vocab" / "words").read_text() == "to be"
    with pytest.raises(
        DataError, match=r"data\.test is '.*missing': there is no .*missing; it must be"
    ) as error:
        data.prepare_all({"train": "digits", "test": str(tmp_path / "missing")})
    assert error.value._render_traceback_() == [f"DataError: {error.value}"]  # what a notebook shows of it


def test_what_cannot_be_had_is_named_with_each_answer_and_what_to_use_instead(
    server, url_where_nobody_listens, monkeypatch
):
    for source, said in (
        (f"{server.url}/mine", "download it to a folder, and name that; it must be 'digits'"),
        ("s3://bucket/mine", "a bucket is read by SageMaker on AWS alone; here it must be 'digits'"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(source)
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"{url_where_nobody_listens}/", f"{server.url}/busy/"))
    with pytest.raises(DataError, match=r"cannot be reached.* answered 503.*Offline, use data: digits"):
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


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: cut_short(path.parent, path.name, 1)], ids=["gone", "cut short"]
)
def test_a_cache_of_which_a_file_is_damaged_is_made_again(cache, damage):
    folder = prepare("digits")
    damage(folder / "train-images-idx3-ubyte")
    assert prepare("digits") == folder
    assert arrays(folder).train_images.shape == (1500, 64)
    assert [path.name for path in cache.iterdir()] == ["digits"]


def test_what_another_process_has_made_meanwhile_is_left_as_it_is(cache, monkeypatch):
    write, made = data._write_digits, []

    def slow(folder):
        write(folder)
        if not made:
            made.append(True)
            made.append(prepare("digits").stat().st_ino)

    monkeypatch.setattr(data, "_write_digits", slow)
    assert prepare("digits").stat().st_ino == made[1]


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be written.*set WORKSHOP_CACHE"):
        prepare("digits")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv("WORKSHOP_CACHE", "~nobody of that name/cache")
    with pytest.raises(OSError, match="no home folder: set HOME or WORKSHOP_CACHE"):
        prepare("digits")


def test_two_processes_at_once_prepare_one_folder(cache):
    spawned = multiprocessing.get_context("spawn")
    together = spawned.Barrier(2)
    with ProcessPoolExecutor(2, spawned, initializer=together.wait) as pool:
        folders = list(pool.map(prepare, ["digits"] * 2))
    assert folders == [cache / "digits"] * 2
    assert place.load("train", folders[0]).count == 1500
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["digits"]
