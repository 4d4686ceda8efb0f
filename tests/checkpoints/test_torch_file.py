import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from digen_jax.checkpoints import torch_file
from digen_jax.checkpoints.torch_file import as_stored, load, open_arrays

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def saved(tmp_path, value, **options):
    file = tmp_path / "model.pt"
    torch.save(value, file, **options)
    return file


def test_every_dtype_is_read_as_torch_wrote_it(tmp_path):
    torch.manual_seed(0)
    tensors = {str(dtype): (10 * torch.randn(3, 4)).to(dtype) for dtype in DTYPES}
    found = open_arrays(saved(tmp_path, tensors))
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        expected = as_numpy(tensors[name])
        np.testing.assert_array_equal(array.astype(expected.dtype), expected)
    kinds = {name: tensor.kind for name, tensor in as_stored("x", found).items()}
    assert kinds["torch.bfloat16"] == "BF16" and kinds["torch.bool"] == "BOOL"
    assert type(array) is np.ndarray


def test_views_shared_storages_scalars_and_empty_tensors_are_read(tmp_path):
    base = torch.randn(5, 6, dtype=torch.float32)
    tensors = {
        "whole": base,
        "transposed": base.T,
        "part": base[1:4, ::2],
        "row": base[4],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "one": base[:1, :1].expand(1, 1),
        "parameter": base[:2].contiguous().requires_grad_(),
    }
    found = open_arrays(saved(tmp_path, tensors))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.detach().numpy(), name)
    assert np.shares_memory(found["whole"], found["part"])


def test_a_checkpoint_and_a_modules_state_dict_are_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = module.state_dict()
    whole = {"epoch": 3, "state_dict": state, "rate": 0.5, "names": ["a", ("b", None, True)]}
    found = open_arrays(saved(tmp_path, whole))
    assert found.keys() == state.keys()
    assert found["1.num_batches_tracked"].dtype == np.int64
    plain = load(tmp_path / "model.pt")
    assert plain["names"] == ["a", ("b", None, True)] and plain["epoch"] == 3
    assert open_arrays(saved(tmp_path, state)).keys() == state.keys()


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


def archive(file, content: bytes, members=(), name="archive/data.pkl", kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", kind) as written:
        written.writestr(name, content)
        for key, data in members:
            written.writestr(f"archive/{key}", data)
    return file


def refused(file, words):
    with pytest.raises(ValueError, match=words) as caught:
        load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_is_refused_and_does_nothing(tmp_path, protocol):
    proof = tmp_path / "proof"
    evil = pickle.dumps({"a": Call(os.system, f"touch {proof}")}, protocol)
    refused(archive(tmp_path / "evil.pt", evil), "posix.system|nt.system|operation")
    refused(saved(tmp_path, {"a": Call(os.system, f"touch {proof}")}), "system")
    assert not proof.exists()
    pickle.loads(evil)
    assert proof.exists()  # it would have


@pytest.mark.parametrize(
    "function", [eval, getattr, __import__, np.frombuffer, torch.load, torch.Tensor.numpy]
)
def test_other_functions_are_refused(tmp_path, function):
    refused(saved(tmp_path, {"a": Call(function, "1")}), "it names|cannot be read")


def storage(kind="FloatStorage", key="0", count=4) -> bytes:
    """Operations that leave a storage on the stack."""
    text = b"(" + _text("storage") + b"ctorch\n" + kind.encode() + b"\n" + _text(key)
    return text + _text("cpu") + _number(count) + b"tQ"


def tensor(shape=(4,), strides=(1,), offset=0, first=None) -> bytes:
    """Operations that leave a tensor on the stack."""
    content = b"ctorch._utils\n_rebuild_tensor_v2\n(" + (storage() if first is None else first)
    content += _number(offset)
    for values in (shape, strides):
        content += b"(" + b"".join(map(_number, values)) + b"t"
    return content + b"\x89ccollections\nOrderedDict\n)RtR"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + raw


FOUR = np.arange(4, dtype=np.float32).tobytes()


def crafted(tmp_path, operations: bytes, members=(("data/0", FOUR),)):
    return archive(tmp_path / "crafted.pt", b"\x80\x02" + operations + b".", members)


def test_a_crafted_tensor_is_read(tmp_path):
    np.testing.assert_array_equal(load(crafted(tmp_path, tensor((2, 2), (1, 2)))), [[0, 2], [1, 3]])


@pytest.mark.parametrize(
    "operations",
    [
        tensor((5,)),  # beyond its storage
        tensor((4,), (1,), 1),
        tensor((2,), (2**61,)),
        tensor((), (), 4),
        tensor((3, 2), (1, 1)),  # elements overlap
        tensor((10**6,), (0,)),
        tensor((2,), (-1,), 3),
        tensor((2,), (1,), -1),
        tensor((2**62,), (1,)),
        tensor((2, 2), (1,)),
        tensor((1,) * 70, (1,) * 70),
        tensor(first=_number(3)),
        tensor(first=storage(count=5)),
        tensor(first=storage("DoubleStorage")),
        tensor(first=storage(key="1")),
        tensor(first=storage(key="../data.pkl")),
        tensor(first=storage("UntypedStorage")),
        b"(" + _text("module") + b"tQ",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch\nload\n",
        b"cbuiltins\nobject\n)\x81",
        b"]" + _text("a") + b"Ns",
        _text("FloatStorage") + b")R",
        b"h\x05",
        b"}q",
        b"R",
    ],
    ids=range(26),
)
def test_a_crafted_pickle_is_refused(tmp_path, operations):
    refused(crafted(tmp_path, operations), "cannot be read")


def test_a_pickle_that_is_larger_than_tensors_need_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file, "LARGEST_PICKLE", 20)
    refused(crafted(tmp_path, tensor()), "more than tensors need")


def test_broken_and_strange_archives_are_refused(tmp_path):
    four = (("data/0", FOUR),)
    good = b"\x80\x02" + tensor() + b"."
    refused(archive(tmp_path / "a.pt", good, four, kind=zipfile.ZIP_DEFLATED), "is compressed")
    refused(archive(tmp_path / "b.pt", good, name="archive/other"), "one data.pkl")
    refused(crafted(tmp_path, tensor(), (("data/0", FOUR[:-1]),)), "content is damaged")
    refused(crafted(tmp_path, tensor(), (*four, ("byteorder", b"big"))), "big-endian")
    whole = crafted(tmp_path, tensor()).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-30])
    refused(tmp_path / "cut.pt", "incomplete")
    moved = bytearray(whole)
    at = moved.rindex(b"PK\x01\x02")  # the last entry of the directory: where its member begins
    moved[at + 42 : at + 46] = struct.pack("<I", 7)
    (tmp_path / "moved.pt").write_bytes(moved)
    refused(tmp_path / "moved.pt", "not at the offset")
    (tmp_path / "none.pt").write_bytes(b"")
    refused(tmp_path / "none.pt", "not a file of torch.save")
    refused(tmp_path / "absent.pt", "is missing")


def test_the_format_before_1_6_is_named(tmp_path):
    old = saved(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    refused(old, "torch's format before 1.6: load it with torch, with weights_only=True")


def test_what_is_no_state_dict_is_refused(tmp_path):
    for value, words in [([1], "a list"), ({}, "not tensors"), ({"a": 1}, "'a' is a int")]:
        with pytest.raises(ValueError, match=words):
            open_arrays(saved(tmp_path, value))
