"""Served files that are damaged: a version is right, or one error names the file; and publishers that are killed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from serving.test_folder import IDS, KEYED, collection, values

from torchsparse_rec import nn, serving
from torchsparse_rec.serving.__main__ import main

# ---- Damaged files --------------------------------------------------------------------------------------------------


def growing() -> torch.nn.Module:
    table = nn.EmbeddingVariable(4)
    table(IDS)
    return table.eval()


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], object]] = {
    "layers": (lambda: torch.nn.Sequential(nn.EmbeddingBag(10, 16), torch.nn.Linear(16, 9)), IDS),
    "growing": (growing, IDS),
    "int8": (lambda: nn.quantize(nn.EmbeddingBag(10, 16).eval()), IDS),
    "collection": (collection, KEYED),
}


def bit(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def end(data: bytearray, draw: random.Random) -> None:
    """Flip a bit where the list of members is."""
    place = draw.randrange(1, min(len(data), 1500))
    data[-place] ^= 1 << draw.randrange(8)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def lost(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data))
    del data[begin : begin + draw.randrange(1, 600)]


def zeros(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data)) & ~511
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))


def noise(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data))
    data[begin : begin + 64] = draw.randbytes(len(data[begin : begin + 64]))


def moved(data: bytearray, draw: random.Random) -> None:
    """Exchange two blocks, as a disk may that wrote them to the wrong places."""
    one, two = (draw.randrange(len(data) // 512 + 1) * 512 for _ in range(2))
    data[one : one + 512], data[two : two + 512] = data[two : two + 512], data[one : one + 512]


def longer(data: bytearray, draw: random.Random) -> None:
    data += draw.randbytes(draw.randrange(1, 600))


def tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


DAMAGES = (bit, end, cut, lost, zeros, noise, moved, longer)


def damage_files(folder: Path, seeds: range) -> tuple[int, int]:
    """Load damaged files with ``verify``; return how many were right, and how many were refused."""
    whole = {}
    for name, (make, ids) in MODELS.items():
        model = make().eval()
        serving.save_for_serving(model, folder / name)
        whole[name] = (folder / name / "model.pt").read_bytes(), values(model(ids)).clone(), ids, tensors(model)
    right = refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        name = draw.choice(list(MODELS))
        data, result, ids, state = whole[name]
        damaged, path = bytearray(data), folder / name / "model.pt"
        for _ in range(draw.choice((1, 1, 1, 3))):
            if damaged:
                draw.choice(DAMAGES)(damaged, draw)
        path.unlink()  # whoever has mapped it keeps it
        path.write_bytes(damaged)
        try:
            served = serving.load_for_serving(folder / name, verify=True)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error), seed
            assert main(["check", str(folder / name)]) == 1, seed
            refused += 1
        else:
            assert served.version == 1 and torch.equal(values(served(ids)), result), seed
            assert all(map(torch.equal, tensors(served.model), state)), seed
            assert main(["check", str(folder / name)]) == 0, seed
            right += 1
    return right, refused


def test_damaged_files(tmp_path: Path) -> None:
    right, refused = damage_files(tmp_path, range(20))
    assert right + refused == 20 and refused > 5


@pytest.mark.full
def test_many_damaged_files(tmp_path: Path) -> None:
    right, refused = damage_files(tmp_path, range(1000, 1050))
    assert right > 0 and refused > 25


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check what is whole, then with one file damaged, then both."""
    serving.save_for_serving(MODELS["layers"][0](), tmp_path)
    command = [sys.executable, "-m", "torchsparse_rec.serving", "check", str(tmp_path)]
    assert main(command[3:]) == 0 and capsys.readouterr() == ("", "")
    (tmp_path / "version").write_text("abc")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"check: {tmp_path / 'version'} must hold the number of the last version, got b'abc'")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    for name in (b"data/1", b"data/2"):
        data[data.index(name) + 100] ^= 1
    (tmp_path / "model.pt").write_bytes(data)
    assert main(command[3:]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(str(tmp_path))[2][:35] for line in said[:2]] == [
        f"/model.pt cannot be read: data/{k} is" for k in (1, 2)
    ]
    assert len(said) == 3 and "abc" in said[2]
