import shutil

import pytest

from digen_jax.checkpoints import fingerprint
from digen_jax.checkpoints.fingerprint import PIECE, WHOLE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE", 2**13)
    monkeypatch.setattr(fingerprint, "PIECE", 2**8)
    for part in ("text_encoder", "tokenizer", "vae"):
        (tmp_path / "model" / part).mkdir(parents=True)
        (tmp_path / "model" / part / "config.json").write_text(part)
    (tmp_path / "model" / "text_encoder" / "model.safetensors").write_bytes(bytes(100_001))
    return tmp_path / "model"


def of(folder):
    return fingerprint.fingerprint(folder, ("text_encoder", "tokenizer"))


def test_it_depends_on_what_the_components_hold_alone(folder, tmp_path):
    first = of(folder)
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    (copied / "vae" / "config.json").write_text("other")
    assert of(copied) == first
    (copied / "tokenizer" / "config.json").write_text("other")
    assert of(copied) != first


@pytest.mark.parametrize(
    ("place", "count"), [(0, 1), (100_000, 1), (1, 5), (50_000, 4_000), (96_500, 3_400)]
)
def test_a_change_of_large_files_is_seen(folder, place, count):
    first = of(folder)
    path = folder / "text_encoder" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place : place + count] = b"x" * count
    path.write_bytes(data)
    assert len(data) == 100_001 and of(folder) != first


def test_size_and_name_are_a_part_of_it(folder):
    path = folder / "text_encoder" / "model.safetensors"
    hashes = [of(folder)]
    path.write_bytes(bytes(100_002))
    hashes.append(of(folder))
    path.rename(path.with_name("other.safetensors"))
    hashes.append(of(folder))
    assert len(set(hashes)) == 3


def test_the_work_on_one_file_is_bounded(folder, monkeypatch):
    read = []

    class Counting:
        def update(self, data):
            read.append(len(data))

    fingerprint._update(Counting(), folder / "text_encoder" / "model.safetensors")
    assert sum(read) == fingerprint.WHOLE < 100_001
    assert WHOLE // PIECE > 1


def test_a_missing_component_is_named(folder):
    with pytest.raises(ValueError, match=r"model/text_encoder_2 holds no file"):
        fingerprint.fingerprint(folder, ("text_encoder_2",))
