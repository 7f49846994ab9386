"""Our reader of safetensors files against the library's, on good files and on damaged ones."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from redraft.errors import CheckpointError
from redraft.store.tensorfile import holds_bytes_of, read_header, read_tensor

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_odd_shapes(file: Path, name: str):
    dtype = DTYPES[name]
    made = {
        "matrix": torch.randint(0, 2, (3, 5)).to(dtype),
        "scalar": torch.ones(()).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
        "deep": torch.randint(0, 2, (2, 1, 3, 1)).to(dtype),
    }
    save_file(made, file, metadata={"format": "pt"})
    infos = {info.name: info for info in read_header(file)}
    assert infos.keys() == made.keys()
    for key, tensor in made.items():
        got = read_tensor(infos[key])
        assert infos[key].dtype == name and infos[key].nbytes == tensor.nbytes
        assert got.dtype == dtype and got.shape == tensor.shape and bits(got) == bits(tensor)
        assert holds_bytes_of(infos[key], tensor)


def test_difference_in_any_chunk_is_seen(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redraft.store.tensorfile._CHUNK", 7)
    tensor = torch.arange(20, dtype=torch.uint8)
    save_file({"a": tensor}, file)
    (info,) = read_header(file)
    assert holds_bytes_of(info, tensor)
    for i in range(20):
        changed = tensor.clone()
        changed[i] += 1
        assert not holds_bytes_of(info, changed), i


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(("header", "data", "message"), [
    ({"a": entry()}, b"123", "cut short within tensor a: .* bytes, expected"),
    ({"a": entry(), "b": entry(offsets=(4, 8)), "c": entry(offsets=(8, 12))}, b"1234567", "cut .* within tensor b: "),
    ({"a": entry()}, b"12345", "has .* bytes, its header describes"),
    ({"a": entry(offsets=(1, 5))}, b"12345", "tensor a starts at byte"),
    ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", "tensor b starts at byte"),
    ({"a": entry(shape=(5,))}, b"1234", "tensor a of 5 bytes has offsets 0, 4"),
    ({"a": entry(shape=(-4,))}, b"1234", "tensor a has shape"),
    ({"a": entry(shape=(2.0, 2))}, b"1234", "tensor a has shape"),
    ({"a": entry(dtype="F4")}, b"1234", "tensor a has dtype F4, which Redraft does not know"),
    ({"a": entry(dtype=["U8"])}, b"1234", "tensor a has dtype"),
    ({"a": entry(shape=(2**40, 2**40))}, b"1234", "tensor a of"),
    ({"a": {"dtype": "U8"}}, b"1234", "header cannot be read"),
    ({"a": 3}, b"1234", "header cannot be read"),
    ([1], b"", "header cannot be read"),
    (b"[" * 5000, b"", "header cannot be read"),
    (b"\xff\xfe{}", b"", "header cannot be read"),
    (b'{"a":', b"", "header cannot be read"),
])  # fmt: skip
def test_damaged_headers(file: Path, header: object, data: bytes, message: str):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    with pytest.raises(CheckpointError, match=rf"{file}.*{message}"):
        read_header(file)


def test_huge_header_length_is_not_allocated(file: Path):
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointError, match="header cannot be read"):
        read_header(file)


def test_cut_between_header_and_data(file: Path):
    save_file({"a": torch.zeros(10)}, file)
    (info,) = read_header(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="tensor a cannot be read: the file was cut short"):
        read_tensor(info)
    file.unlink()
    with pytest.raises(CheckpointError, match="tensor a cannot be read"):
        read_tensor(info)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_the_library_accepts_too(file: Path, data: st.DataObject):
    save_file({"one": torch.arange(6).float(), "two": torch.zeros(2, 3).half()}, file, metadata={"format": "pt"})
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    at = data.draw(st.integers(0, header - 1), "at")
    bad = good[:at] + data.draw(st.binary(min_size=1, max_size=2), "bytes") + good[at + 1 :]
    file.write_bytes(bad[: data.draw(st.sampled_from([len(bad), len(bad) - 1, header]), "length")])
    try:
        infos = read_header(file)
    except CheckpointError:
        return
    try:
        with safe_open(file, "pt") as f:
            assert {info.name for info in infos} == set(f.keys())
            for info in infos:
                assert bits(read_tensor(info)) == bits(f.get_tensor(info.name))
    except SafetensorError as e:
        pytest.fail(f"the library refuses it: {e}")
