"""The reader of .bin files: what a good file yields, and that no damage to one gets through."""

import numpy as np
import pytest
from synthetic import DENSE, STACK, seal, write_model

from colibri import headers
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError

STRUCTS = headers.default().structs
START = STRUCTS["BinHeader"].itemsize


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.bin")


def edit(path, change):
    """Applies change(header, directory) to a model's first bytes and puts the checksum right."""
    data = bytearray(path.read_bytes())
    header = np.frombuffer(data, STRUCTS["BinHeader"], 1)[0]
    directory = np.frombuffer(data, STRUCTS["BinTensor"], int(header["num_tensors"]), START)
    change(header, directory)
    end = START + directory.nbytes
    path.write_bytes(seal(bytes(data[:end])) + data[end:])


@pytest.mark.parametrize("shape", [DENSE, STACK, {**DENSE, "tied_embeddings": 1, "weight_dtype": 2},
                                   {**DENSE, "gated": 0, "weight_dtype": 0, "router_bias": 1, "router_kind": 2}])
def test_yields_every_tensor_in_place_and_read_only(tmp_path, shape):
    path = write_model(tmp_path / "model.bin", shape)
    checkpoint = Checkpoint(path)
    data = path.read_bytes()
    assert checkpoint.header["hidden"] == shape["hidden"]
    assert checkpoint.header["norm_eps"] == np.float32(shape["norm_eps"])
    assert list(checkpoint.tensors) == [tensor.name for tensor in headers.default().tensors(checkpoint.header)]
    for entry in np.frombuffer(data, STRUCTS["BinTensor"], checkpoint.header["num_tensors"], START):
        view = checkpoint.tensors[entry["name"].decode()]
        assert view.tobytes() == data[int(entry["offset"]):int(entry["offset"] + entry["bytes"])]
        assert not view.flags.writeable and view.base is not None
    with pytest.raises(ValueError):
        checkpoint.data[0] = 0


def test_converted_model(moe_32):
    checkpoint = Checkpoint(moe_32)
    assert len(checkpoint.tensors) == 4 + 6 * 7
    assert checkpoint.tensors["layers.5.experts_up"].size == 32 * 192 * 128
    assert checkpoint.tensors["layers.5.router"].dtype == np.float32


def test_every_flipped_bit_of_header_and_directory_is_found(model):
    data = model.read_bytes()
    end = START + STRUCTS["BinTensor"].itemsize * Checkpoint(model).header["num_tensors"]
    with open(model, "r+b", buffering=0) as file:
        for position in range(end):
            file.seek(position)
            file.write(bytes([data[position] ^ 1 << position % 8]))
            with pytest.raises(ColibriError):
                Checkpoint(model)
            file.seek(position)
            file.write(data[position:position + 1])
    Checkpoint(model)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 15, 16, 511, 512, 513, 4096, -1])
def test_every_truncation_is_found(model, size):
    model.write_bytes(model.read_bytes()[:size])
    with pytest.raises(ColibriError, match="model.bin: "):
        Checkpoint(model)


def test_trailing_bytes_are_found(model):
    model.write_bytes(model.read_bytes() + b"x")
    with pytest.raises(ColibriError, match="size="):
        Checkpoint(model)


def set_tensor(field, value, index=4):
    def change(header, directory):
        directory[field][index] = value
    return change


def set_header(field, value):
    def change(header, directory):
        header[field] = value
    return change


@pytest.mark.parametrize("change, message", [
    (set_tensor("offset", 4096 * 3 + 8), "offset=12296, expected a multiple of 4096"),
    (set_tensor("offset", 1 << 40), "offset=1099511627776, expected at most"),
    (set_tensor("offset", 1 << 63), "offset=9223372036854775808, expected at most"),
    (set_tensor("offset", 0), "begins at byte 0, expected at or after byte 256"),
    (set_tensor("offset", 4096), "expected at or after byte"),
    (set_tensor("bytes", 0), "bytes=0, expected 256"),
    (set_tensor("rank", 9), "rank=9, expected 1"),
    (set_tensor("dtype", 7), "dtype=7, expected F32"),
    (set_tensor("dtype", 3), "dtype=INT8, expected F32"),
    (set_tensor("shape", [63, 0, 0]), r"shape=\(63,\), expected \(64,\)"),
    (set_tensor("shape", [64, 1, 0]), "shape="),
    (set_tensor("name", b"embed"), "'embed' is in the directory twice"),
    (set_tensor("name", b"layers.0.gate"), "layers.0.attention_norm is missing"),
    (set_header("num_layers", 0xFFFFFFFF), "num_layers=4294967295, expected no more than"),
    (set_header("num_layers", 1), "'layers.1.attention_norm' is not a tensor of such a model"),
    (set_header("window", 1 << 31), "window=2147483648, expected below 2.31"),
    (set_header("num_layers", 0), "num_layers=0, expected at least 1"),
    (set_header("hidden", 0), "hidden=0, expected at least 1"),
    (set_header("hidden", 0xFFFFFFFF), "embed: shape="),
    (set_header("k", 9), "k=9, expected 1 to 16, and at most num_experts=8"),
    (set_header("k", 0), "k=0, expected 1 to 16, and at most num_experts=8"),
    (set_header("num_experts", 257), "num_experts=257, expected 1 to 256"),
    (set_header("weight_dtype", 3), r"weight_dtype=3, expected 0 \(f32\), 1 \(f16\) or 2 \(bf16\)"),
    (set_header("expert_dtype", 3), "layers.0.experts_up: dtype=F16, expected BF16"),
    (set_header("dense_dtype", 1), "embed: dtype=F16, expected F32"),
    (set_header("embed_dtype", 1), "embed: dtype=F16, expected F32"),
    (set_header("expert_dtype", 8), r"expert_dtype=8, expected 0, 1 \(f32\), 2 \(f16\), .* \(fp8\) or 7 \(mxfp4\)"),
    (set_header("expert_dtype", 4), "expert_group=0, expected 32, 64 or 128 with int8 and int4"),
    (set_header("dense_group", 32), "dense_group=32, expected 0 without weights of few bits"),
    (set_header("embed_zero_points", 1), "embed_zero_points=1, expected 0, or 1 with int8 and int4"),
    (set_header("compute_dtype", 1), r"compute_dtype=1, expected 0 \(weight_dtype\), 2 \(f16\) or 3 \(bf16\)"),
    (set_header("activation", 4), "activation=4"),
    (set_header("router_kind", 99), "router_kind=99"),
    (set_header("gated", 2), "gated=2, expected 0 or 1"),
    (set_header("num_groups", 3), "num_groups=3, expected a divisor of num_experts=8"),
    (set_header("num_groups", 0), "num_groups=0"),
    (set_header("topk_groups", 2), "topk_groups=2, expected 1 to num_groups=1"),
    (set_header("head_dim", 15), "head_dim=15, expected an even number"),
    (set_header("num_kv_heads", 3), "num_kv_heads=3, expected a divisor of num_heads=4"),
    (set_header("vocab_size", 0), "vocab_size=0, expected 0 for a bare stack"),
    (set_header("norm_eps", float("nan")), "norm_eps=nan, expected a finite number"),
    (set_header("norm_eps", 0), "norm_eps=0.0, expected more than 0"),
    (set_header("rope_theta", 0), "rope_theta=0.0, expected more than 0"),
    (set_header("rope_kind", 4), r"rope_kind=4, expected one of .*, 2 \(long\), 3 \(dynamic\)"),
    (set_header("rope_kind", 3), "rope_original_positions=0, expected at least 1 with rope_kind=long or dynamic"),
    (set_header("rope_long_attention_factor", float("inf")), "rope_long_attention_factor=inf, expected a finite"),
    (set_tensor("scale", 1), "scale=1.0, expected 0 with F32"),
    (set_header("interleave_rows", 32), "interleave_rows=32, expected 64"),
    (set_header("directory_offset", 1 << 62), "directory=bytes"),
    (set_header("num_tensors", 0xFFFFFFFF), "num_tensors=4294967295, expected at most 65536"),
    (set_header("num_tensors", 65536), "directory=bytes 512 to 7864832, expected inside"),
    (set_header("header_bytes", 255), "header_bytes=255, expected 512"),
    (set_header("reserved", 1), "reserved=not zero, expected 0"),
    (set_header("num_eos", 9), "num_eos=9, expected at most 8"),
    (set_header("add_bos", 2), "add_bos=2, expected 0 or 1"),
    (set_header("bos_id", 1), "bos_id=1, expected 0 without add_bos"),
    (set_header("version", 3), "version=3, this build reads 1 and 2"),
])
def test_wrong_values_under_a_right_checksum(model, change, message):
    edit(model, change)
    with pytest.raises(ColibriError, match=message):
        Checkpoint(model)


@pytest.mark.parametrize("changes, message", [
    ({"rope_kind": 2}, "rope_original_positions=0, expected at least 1 with rope_kind=long or dynamic"),
    ({"rope_kind": 3, "rope_original_positions": 9}, "rope_dynamic_factor=0.0, expected at least 1 with rope_kind=dyn"),
    ({"rope_kind": 3, "rope_original_positions": 9, "rope_dynamic_factor": 2.0, "rotary_dim": 2},
     "rotary_dim=2, expected at least 4 with rope_kind=dynamic")])
def test_what_frequencies_by_length_need(tmp_path, changes, message):
    with pytest.raises(ColibriError, match=message):
        Checkpoint(write_model(tmp_path / "model.bin", **changes))


def test_longrope_has_a_second_vector(tmp_path):
    path = write_model(tmp_path / "model.bin", rope_kind=2, rope_original_positions=9)
    assert Checkpoint(path).tensors["rope_long_frequencies"].shape == (8,)
    assert "rope_long_frequencies" not in Checkpoint(write_model(tmp_path / "model.bin")).tensors
    edit(write_model(path), set_header("rope_kind", 2))
    edit(path, set_header("rope_original_positions", 9))
    with pytest.raises(ColibriError, match="rope_long_frequencies is missing, expected shape"):
        Checkpoint(path)


@pytest.mark.parametrize("field", ["num_kv_heads", "head_dim"])
def test_a_stack_has_no_heads_of_any_kind(tmp_path, field):
    path = write_model(tmp_path / "stack.bin", STACK)
    edit(path, set_header(field, 2))
    with pytest.raises(ColibriError, match=f"{field}=2, expected 0 for num_heads=0"):
        Checkpoint(path)


def test_a_stack_has_no_dense_layers(tmp_path):
    path = write_model(tmp_path / "stack.bin", STACK, dense_layers=headers.mask([0]), dense_ffn=64)
    with pytest.raises(ColibriError, match="dense_layers=some, expected none in a bare stack; the file is damaged"):
        Checkpoint(path)


def test_bos(model):
    """A token of the model; a file of before has none."""
    assert Checkpoint(model).bos is None
    edit(model, set_header("add_bos", 1))
    for bos in (255, 0):
        edit(model, set_header("bos_id", bos))
        assert Checkpoint(model).bos == bos
    edit(model, set_header("bos_id", 256))
    with pytest.raises(ColibriError, match="bos_id=256, expected below vocab_size=256; the file is damaged"):
        Checkpoint(model)


@pytest.mark.parametrize("path", [None, 3.5])
def test_no_name(path):
    with pytest.raises(ColibriError, match="expected the name of a file"):
        Checkpoint(path)


def test_hole(model):
    """The last tensor, moved a page further on."""
    model.write_bytes(model.read_bytes() + bytes(4096))

    def change(header, directory):
        header["file_bytes"] += 4096
        directory["offset"][-1] += 4096
    edit(model, change)
    with pytest.raises(ColibriError, match="belong to nothing"):
        Checkpoint(model)


def test_random_damage_never_escapes_as_another_exception(model):
    generator = np.random.default_rng(1)
    original = model.read_bytes()[:8192]
    end = START + STRUCTS["BinTensor"].itemsize * Checkpoint(model).header["num_tensors"]
    size = model.stat().st_size
    for _ in range(500):
        data = bytearray(original)
        for position in generator.integers(8, end, generator.integers(1, 6)):
            data[position] = generator.integers(256)
        data[24:32] = size.to_bytes(8, "little")
        with open(model, "r+b") as file:
            file.write(seal(bytes(data[:end])))
        try:
            Checkpoint(model)
        except ColibriError as error:
            assert "\n" not in str(error)
