"""What a served model follows: numbers, links in a folder, forks, pages of large versions, folders of before."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked, needs_fork

from torchsparse_rec import nn, serving
from torchsparse_rec.serving import _folder
from torchsparse_rec.serving.__main__ import main

IDS = torch.tensor([[1, 2, 3]])
ROWS = 100_000  # 6.4 MB of one thread's own


def table(number: float, rows: int = 4) -> torch.nn.Module:
    return nn.Embedding(rows, 16, _weight=torch.full((rows, 16), float(number)))


def wait_for(served: serving.ServedModel, version: int) -> None:
    end = time.monotonic() + 60
    while served.version != version and time.monotonic() < end:
        time.sleep(0.005)
    assert served.version == version


# ---- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [None, "", "2", "3\n"])
def test_a_number_that_is_lost_is_the_models(left: str | None, tmp_path: Path) -> None:
    """Publish after a publisher of an older version was killed as it wrote the number, and where its file is lost."""
    for number in (1, 2, 3):
        assert serving.save_for_serving(table(number), tmp_path) == number
    (tmp_path / "version").unlink()
    if left is not None:
        (tmp_path / "version").write_text(left)
    assert serving.save_for_serving(table(4), tmp_path) == 4


@pytest.mark.parametrize("left", ["abc", "-1", "1e3", "1 2", "9" * 30, "\0\0"])
def test_a_number_that_is_damaged(left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serving.save_for_serving(table(1), tmp_path)
    (tmp_path / "version").write_text(left)
    match = re.escape(f"{tmp_path / 'version'} must hold the number of the last version, got b'")
    with pytest.raises(ValueError, match=match):
        serving.save_for_serving(table(2), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "version"] and serving.load_for_serving(tmp_path).version == 1
    assert main(["check", str(tmp_path)]) == 1 and re.search(match, capsys.readouterr().err)


def test_no_file_tells_the_number(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"no archive")
    with pytest.raises(
        ValueError, match=r"version must hold .*, got nothing: write it there, as .*model\.pt cannot be"
    ):
        serving.save_for_serving(table(1), tmp_path)
    (tmp_path / "version").write_text("7")
    assert serving.save_for_serving(table(1), tmp_path) == 8


@pytest.mark.parametrize("name", [".unfinished.pt", ".unfinished", "version", "model.pt"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_replaced_and_not_followed(name: str, there: bool, tmp_path: Path) -> None:
    folder, precious = tmp_path / "folder", tmp_path / "precious"
    folder.mkdir()
    if there:
        precious.write_text("41")
    (folder / name).symlink_to(precious)
    if name == "model.pt" and there:
        with pytest.raises(ValueError, match="version must hold the number"):
            serving.save_for_serving(table(1), folder)
        (folder / "version").write_text("41")
    version = serving.save_for_serving(table(1), folder)
    assert version == (42 if name == "model.pt" and there else 1)
    assert precious.exists() == there and (not there or precious.read_text() == "41")
    assert sorted(os.listdir(folder)) == ["model.pt", "version"] and not (folder / name).is_symlink()
    assert serving.load_for_serving(folder).version == version


def test_a_full_disk(tmp_path: Path) -> None:
    """Publish where files may have 64 KB: the error names the file, and the version that is there stays."""
    serving.save_for_serving(table(1), tmp_path)
    large = table(2, ROWS)  # not in the forked process, which lacks the threads of torch's that would fill it

    def publish() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        serving.save_for_serving(large, tmp_path)

    assert re.fullmatch(rf"OSError: \[Errno \d+\] .*: '{tmp_path}/\.unfinished\.pt'", forked(publish))
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "version"]
    assert serving.load_for_serving(tmp_path).version == 1 and serving.save_for_serving(table(2), tmp_path) == 2


# ---- Forks ----------------------------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [4, ROWS])
def test_a_process_that_was_forked_while_a_thread_loads_follows(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.save_for_serving(table(1, rows), tmp_path)
    served = serving.load_for_serving(tmp_path)
    served(IDS)
    real, begun, go = torch.load, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        go.wait()
        return real(*arguments, **options)

    def look() -> list[int]:
        torch.load = real
        numbers = [served(IDS).min().item(), served.version]
        serving.save_for_serving(table(3, rows), tmp_path)
        served(IDS)
        wait_for(served, 3)
        return [*numbers, served(IDS).min().item()]

    monkeypatch.setattr(torch, "load", slow)
    serving.save_for_serving(table(2, rows), tmp_path)
    thread = threading.Thread(target=served, args=(IDS,), daemon=True)
    thread.start()
    begun.wait()
    try:
        assert forked(look) == "[2.0, 2, 3.0]"
    finally:
        torch.load = real
        go.set()
    thread.join()
    served(IDS)
    wait_for(served, 3)


# ---- Large versions --------------------------------------------------------------------------------------------------


def resident(folder: Path) -> list[int]:
    """Return the bytes of the mapped pages of each version that this process has mapped."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{folder}/\S+(?: \(deleted\))?\n(?:\w+: .*\n)*?Rss: +(\d+) kB", text)
    return [int(x) << 10 for x in found]


def test_pages_are_mapped_before_calls_use_them(tmp_path: Path) -> None:
    """Let a thread take a large version: no page is left for calls, none was mapped by the first load."""
    serving.save_for_serving(table(1, ROWS), tmp_path)
    served = serving.load_for_serving(tmp_path)
    assert resident(tmp_path) == [0]
    assert served(IDS).min() == 1
    serving.save_for_serving(table(2, ROWS), tmp_path)
    wait_for(served, 2)
    assert max(resident(tmp_path)) >= ROWS * 16 * 4 and served(IDS).min() == 2


def test_where_memory_has_no_room_for_them_pages_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchsparse_rec.serving._archive._available_memory", lambda: ROWS * 16)
    serving.save_for_serving(table(1, ROWS), tmp_path)
    served = serving.load_for_serving(tmp_path, poll=None)
    serving.save_for_serving(table(2, ROWS), tmp_path)
    assert served.model is served.model and served.version == 2 and resident(tmp_path) == [0]


def test_the_thread_ends_with_the_model(tmp_path: Path) -> None:
    serving.save_for_serving(table(1), tmp_path)
    before = threading.active_count()
    served = serving.load_for_serving(tmp_path, poll=0.001)
    served(IDS)
    assert threading.active_count() == before + 1
    del served
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.001)  # where the thread was the last to hold it
    assert threading.active_count() == before


@pytest.mark.parametrize("poll", [0, -1.0, float("nan")])
def test_poll(poll: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"load_for_serving: poll must be None or above 0, got {poll}"):
        serving.load_for_serving(tmp_path, poll=poll)


def test_a_large_version_that_cannot_be_read(tmp_path: Path) -> None:
    """Damage a row, which only ``verify`` sees, in a version that a thread takes: one call warns."""
    serving.save_for_serving(table(1, ROWS), tmp_path)
    served = serving.load_for_serving(tmp_path, verify=True)
    served(IDS)
    serving.save_for_serving(table(2, ROWS), tmp_path / "other")
    damage(tmp_path / "other/model.pt", 2.0)
    os.replace(tmp_path / "other/model.pt", tmp_path / "model.pt")
    end = time.monotonic() + 60
    with pytest.warns(
        UserWarning, match=r"version 1 is served on: .*model\.pt cannot be read: data/1 is damaged: "
    ) as seen:
        while not seen and time.monotonic() < end:
            assert served(IDS).min() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served(IDS)


# ---- What is read, and compared --------------------------------------------------------------------------------------


def damage(path: Path, number: float) -> None:
    """Flip a bit of the last of some floats of this value."""
    data = bytearray(path.read_bytes())
    data[data.rindex(torch.full((8,), number).numpy().tobytes())] ^= 1
    path.unlink()
    path.write_bytes(data)


def layers() -> torch.nn.Module:
    model = torch.nn.Sequential(table(1, ROWS), torch.nn.Linear(16, 8), nn.EmbeddingVariable(16))
    torch.nn.init.constant_(model[1].bias, 5.0)
    model[2](torch.arange(ROWS))
    return model


def bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_load_reads_no_rows(tmp_path: Path) -> None:
    """Count the bytes that a load reads or maps: all but tables, of which only ``verify`` reads all."""
    serving.save_for_serving(layers(), tmp_path)
    size = (tmp_path / "model.pt").stat().st_size
    for verify, least, most in ((False, 0, size // 100), (True, size, 2 * size)):
        before = bytes_read()
        served = serving.load_for_serving(tmp_path, verify=verify)
        assert least <= bytes_read() - before + sum(resident(tmp_path)) < most
        del served


@pytest.mark.parametrize("number", [1.0, 5.0], ids=["rows", "dense layer"])
def test_a_bit_is_flipped(number: float, tmp_path: Path) -> None:
    """Flip a bit of a table, which is served unless ``verify`` is asked for, and of a dense layer, which never is."""
    serving.save_for_serving(layers(), tmp_path)
    damage(tmp_path / "model.pt", number)
    for verify in (False, True):
        if number == 1.0 and not verify:
            serving.load_for_serving(tmp_path)
            continue
        with pytest.raises(ValueError, match=rf"{tmp_path}/model\.pt cannot be read: data/\d is damaged: "):
            serving.load_for_serving(tmp_path, verify=verify)


class Gone(torch.nn.Module):
    """A class that is renamed after a model of it was published."""


@pytest.mark.parametrize("content", ["class", "state", "no module"])
def test_an_archive_that_is_no_model_here(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"class": Gone(), "state": table(1).state_dict(), "no module": 3}[content]
    torch.save({"version": 1, "model": module} if content != "state" else module, tmp_path / "model.pt")
    monkeypatch.delattr(f"{__name__}.Gone")
    match = {"class": "AttributeError: .*Gone"}.get(content, "it holds no version of a model")
    with pytest.raises(ValueError, match=rf"{tmp_path}/model\.pt cannot be read: {match}"):
        serving.load_for_serving(tmp_path)


@pytest.mark.parametrize("sums", [True, False])
def test_a_folder_of_before(sums: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Load, follow and verify what was published before dense layers were compared; without any checksums, say so."""
    torch.serialization.set_crc32_options(sums)
    try:
        torch.save({"version": 3, "model": table(3)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    served = serving.load_for_serving(tmp_path)
    assert served(IDS).min() == 3 and served.version == 3
    if sums:
        assert serving.load_for_serving(tmp_path, verify=True).version == 3 and main(["check", str(tmp_path)]) == 0
    else:
        with pytest.raises(ValueError, match=r"model\.pt cannot be read: it has no checksums to compare"):
            serving.load_for_serving(tmp_path, verify=True)
        assert main(["check", str(tmp_path)]) == 1 and "has no checksums" in capsys.readouterr().err
    assert serving.save_for_serving(table(4), tmp_path) == 4 and served(IDS).min() == 4


def test_what_is_published_is_as_before(tmp_path: Path) -> None:
    """Read a version as older code does, which knows two keys."""
    serving.save_for_serving(table(1), tmp_path)
    found = torch.load(tmp_path / _folder.MODEL, weights_only=False)
    assert found["version"] == 1 and found["model"](IDS).min() == 1
    assert (tmp_path / _folder.VERSION).read_text() == "1"
