"""Downloading ml-100k from servers that are slow, endless, or send something else."""

import contextlib
import hashlib
import io
import os
import socket
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from torchsparse_rec.data import releases as data

CONTENT = b"1\t2\t3\t881250949\n"
BOMB = bytes(data.MOST_BYTES + 1)


@contextlib.contextmanager
def server(answer):
    """Yield the address of a local server that calls ``answer`` with a function that sends bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the reader has left
                answer(self.wfile.write)

        def log_message(self, *_):
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.daemon_threads = True
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/ml-100k.zip"
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


def archive(content=CONTENT, name=data.MEMBER, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as members:
        members.writestr(name, content)
    return buffer.getvalue()


def declaring(size, content):
    """Return an archive that declares a false size of its file, in both places where sizes stand."""
    whole, true = archive(content), len(content).to_bytes(4, "little")
    assert whole.count(true) >= 2
    return whole.replace(true, size.to_bytes(4, "little"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "cache_file", lambda: tmp_path / "cache" / "u.data")
    monkeypatch.setattr(data, "MD5", hashlib.md5(CONTENT).hexdigest())
    return tmp_path / "cache"


def test_it_is_downloaded(cache):
    with server(lambda send: send(archive())) as url:
        assert data.download(url).read_bytes() == CONTENT
    assert data.download(url).read_bytes() == CONTENT  # from the cache: the server is gone
    for damaged in (b"x", BOMB):  # a cached file that is much too large is not even read
        (cache / "u.data").write_bytes(damaged)
        with server(lambda send: send(archive())) as url:
            assert data.download(url).read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == ["u.data"]


def test_a_server_that_drips_has_a_time_limit(cache):
    def drip(send):
        for _ in range(1000):
            send(b"P")
            time.sleep(0.02)

    begun = time.monotonic()
    with server(drip) as url, pytest.raises(TimeoutError, match=r"ml-100k.zip was not complete within 0.3 s"):
        data.download(url, total_seconds=0.3)
    assert time.monotonic() - begun < 10 and not cache.exists()


def test_an_endless_server_has_a_limit_of_bytes(cache, monkeypatch):
    monkeypatch.setattr(data, "MOST_BYTES", 1 << 20)
    sent = []

    def flood(send):
        while True:
            send(bytes(1 << 16))
            sent.append(1 << 16)

    text = "sends more than 1,048,576 bytes: it is not the archive"
    with server(flood) as url, pytest.raises(ValueError, match=text):
        data.download(url)
    # What the sockets hold comes on top.
    assert sum(sent) < 64 << 20 and not cache.exists()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (archive(BOMB), "ml-100k/u.data declares 8,388,609 bytes, more than 8,388,608"),
        (declaring(1000, BOMB), "is no archive that can be unpacked: Bad CRC-32"),
        (declaring(2**32 - 2, BOMB), "declares 4,294,967,294 bytes"),
        (archive(method=zipfile.ZIP_BZIP2), "ml-100k/u.data must be stored or deflated, got method 12"),
        (archive(name="README"), "holds no ml-100k/u.data"),
        (archive(b"x"), "wrong checksum of u.data"),
        (archive()[:-30], "is no archive that can be unpacked: File is not a zip file"),
        (b"<html>log in first</html>", "is no archive that can be unpacked: File is not a zip file"),
        (b"", "is no archive that can be unpacked: File is not a zip file"),
    ],
)
def test_what_is_not_the_archive_is_refused(body, text, cache):
    with server(lambda send: send(body)) as url, pytest.raises(ValueError, match=text):
        data.download(url)
    assert not cache.exists()


def test_bytes_are_counted_whatever_is_declared(monkeypatch):
    """Count unpacked bytes too, although zipfile gives no more than is declared."""
    body = archive(bytes(5000))
    monkeypatch.setattr(data, "MOST_BYTES", 4000)
    stream = io.BytesIO(bytes(5000))
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: stream)
    monkeypatch.setattr(zipfile.ZipFile, "getinfo", lambda self, name: zipfile.ZipInfo(name))
    with pytest.raises(ValueError, match="x: ml-100k/u.data unpacks to more than 4,000 bytes"):
        data._unpack("x", body)
    assert stream.closed


def test_a_server_that_speaks_something_else_is_an_oserror(cache):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-x\r\n\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(OSError, match="no proper answer, BadStatusLine"):
            data.download(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        thread.join()


def test_a_file_that_cannot_be_written_leaves_nothing(cache, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with server(lambda send: send(archive())) as url, pytest.raises(KeyboardInterrupt):
        data.download(url)
    assert list(cache.iterdir()) == []
