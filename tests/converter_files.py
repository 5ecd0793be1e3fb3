"""Checkpoints to convert, written opcode by opcode without torch, and .bin files read back from the format's rules."""

import struct
import zipfile
import zlib

import numpy as np
import reference_formats

from colibri import headers

CLASSES = {"f4": "FloatStorage", "f2": "HalfStorage", "f8": "DoubleStorage", "u2": "BFloat16Storage",
           "i1": "CharStorage"}  # uint16 stands for the bits of bfloat16


def text(string):
    return b"X" + struct.pack("<I", len(string.encode())) + string.encode()


def integer(value):
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def numbers(values):
    return b"(" + b"".join(map(integer, values)) + b"t"


def tensor(storage, key, numel, offset, shape, strides, metadata=b""):
    """A _rebuild_tensor_v2 call. metadata: a pickled seventh argument."""
    return (b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key)
            + text("cpu") + integer(numel) + b"tQ" + integer(offset) + numbers(shape) + numbers(strides)
            + b"\x89N" + metadata + b"tR")


def state_dict(arrays, metadata=b""):
    """(pickled dict, {key: bytes}) of arrays; each keeps its strides and has a storage of its own."""
    items, storages = [], {}
    for key, (name, array) in enumerate(arrays.items()):
        order = np.argsort([-stride for stride in array.strides], kind="stable")
        storages[str(key)] = np.ascontiguousarray(array.transpose(order)).tobytes()
        strides = [stride // array.itemsize for stride in array.strides]
        items.append(text(name) + tensor(CLASSES[array.dtype.str[1:]], str(key), array.size, 0, array.shape, strides,
                                         metadata))
    return b"}(" + b"".join(items) + b"u", storages


def write_zip(path, pickled, storages, compression=zipfile.ZIP_STORED, extra=()):
    """The container of torch.save around a pickle's body."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        for name, data in extra:
            archive.writestr("archive/" + name, data)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def write_pt(path, arrays, wrap=(), **options):
    """A checkpoint of arrays by name, inside the dicts that `wrap` names."""
    pickled, storages = state_dict(arrays)
    for name in wrap:
        pickled = b"}" + text(name) + pickled + b"s"
    return write_zip(path, pickled, storages, **options)


def gpt_arrays(layers=2, experts=3, hidden=10, ffn=6, dtype=np.float16, seed=0):
    """A stack of 2-matrix experts in GPT-style names."""
    generator, arrays = np.random.default_rng(seed), {}
    for layer in range(layers):
        name = f"transformer.h.{layer}.mlp."
        arrays[name + "router.weight"] = generator.standard_normal((experts, hidden)).astype(dtype)
        for expert in range(experts):
            arrays[f"{name}experts.{expert}.w1.weight"] = generator.standard_normal((ffn, hidden)).astype(dtype)
            arrays[f"{name}experts.{expert}.w2.weight"] = generator.standard_normal((hidden, ffn)).astype(dtype)
    return arrays


MIXTRAL_CONFIG = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 10,
                  "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "head_dim": 6, "vocab_size": 11, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
                  "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "sliding_window": None}


def mixtral_arrays(layers=2, experts=3, hidden=10, ffn=6, dtype=np.float16, seed=0):
    """A transformer of MIXTRAL_CONFIG's dimensions in Mixtral's names."""
    shapes = {"model.embed_tokens.weight": (11, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (11, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes.update({name + "input_layernorm.weight": (hidden,), name + "self_attn.q_proj.weight": (24, hidden),
                       name + "self_attn.k_proj.weight": (12, hidden), name + "self_attn.v_proj.weight": (12, hidden),
                       name + "self_attn.o_proj.weight": (hidden, 24),
                       name + "post_attention_layernorm.weight": (hidden,),
                       name + "block_sparse_moe.gate.weight": (experts, hidden)})
        for expert in range(experts):
            matrix = f"{name}block_sparse_moe.experts.{expert}."
            shapes.update({matrix + "w1.weight": (ffn, hidden), matrix + "w2.weight": (hidden, ffn),
                           matrix + "w3.weight": (ffn, hidden)})
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def read_bin(path):
    """(header, {name: array in its directory shape}) of a version 2 file; checks all that the format promises."""
    structs, data = headers.default().structs, path.read_bytes()
    header = np.frombuffer(data, structs["BinHeader"], 1)[0]
    start, count = int(header["directory_offset"]), int(header["num_tensors"])
    directory = np.frombuffer(data, structs["BinTensor"], count, start)
    blank = header.copy()
    blank["header_crc32"] = 0
    assert header["magic"] == b"COLI" and header["version"] == 2 and header["file_bytes"] == len(data)
    assert header["header_crc32"] == zlib.crc32(blank.tobytes() + directory.tobytes())
    arrays, end = {}, start + directory.nbytes
    for entry in directory:
        name, offset = entry["name"].decode(), int(entry["offset"])
        assert offset % 4096 == 0 and 0 <= offset - end < 4096 and not any(data[end:offset]), name
        end = offset + int(entry["bytes"])
        assert entry["crc32"] == zlib.crc32(data[offset:end]), name
        gated = bool(header["gated"]) and name.endswith(("experts_up", "mlp_up"))
        shape = entry["shape"][:entry["rank"]]
        if entry["dtype"] > 2:
            arrays[name] = _few_values(header, entry, np.frombuffer(data[offset:end], np.uint8), shape, gated)
            continue
        dtype = {0: "<f4", 1: "<f2", 2: "<u2"}[int(entry["dtype"])]
        assert entry["scale"] == 0
        arrays[name] = _unpanelled(np.frombuffer(data[offset:end], dtype), shape, gated)
    for section in ("tokenizer", "settings"):
        start, size = int(header[f"{section}_offset"]), int(header[f"{section}_bytes"])
        if size:
            assert start % 4096 == 0 and 0 <= start - end < 4096 and not any(data[end:start])
            end = start + size
            assert zlib.crc32(data[start:end]) == header[f"{section}_crc32"]
    assert len(data) - end < 4096 and not any(data[end:])
    return header, arrays


def _few_values(header, entry, stored, shape, gated):
    """The exact values of weights of few bits, float64."""
    name, shape = entry["name"].decode(), [int(size) for size in shape]
    kind = next(tensor.type for tensor in headers.default().tensors(header) if tensor.name == name)
    form, (experts, rows, columns) = headers.form_of(kind, header), ([1] + shape)[-3:]
    assert form.dtype == entry["dtype"] and (entry["scale"] > 0) == headers.has_scale(form.dtype)
    panels = stored.reshape(-1, experts, headers.panel_values(form, columns)["panel_bytes"])
    codes, scales, zeros = reference_formats.unpack(form, panels, len(panels) * 64, columns)
    wide = np.repeat(scales, form.group, -1)[..., :columns].astype(np.float64)
    if form.dtype == reference_formats.FP8:
        values = reference_formats.e4m3()[codes] * wide
    elif form.dtype == reference_formats.MXFP4:
        values = np.ldexp(reference_formats.E2M1[codes].astype(np.float64), wide.astype(int) - 127)
    else:
        zero = reference_formats.ZERO[form.dtype] if zeros is None else np.repeat(zeros, form.group, -1)[..., :columns]
        values = (codes - np.float64(zero)) * wide * np.float64(entry["scale"])
    places = np.arange(rows)
    if gated:
        half, index = places // (rows // 2), places % (rows // 2)
        places = index // 8 * 16 + half * 8 + index % 8
    filling = np.delete(np.arange(len(panels) * 64), places)
    assert not values[:, filling].any() and (form.dtype == reference_formats.MXFP4 or not scales[:, filling].any())
    return values[:, places].reshape(shape)


def _unpanelled(stored, shape, gated):
    """Walks the panels one element at a time, straight from native/format.h."""
    shape = [int(size) for size in shape]
    if len(shape) == 1:
        return stored
    experts, rows, columns = ([1] + shape)[-3:]
    used, result = np.zeros(stored.size, bool), np.empty((experts, rows, columns), stored.dtype)
    for row in range(rows):
        place = row
        if gated:
            half, index = divmod(row, rows // 2)
            place = index // 8 * 16 + half * 8 + index % 8
        for expert in range(experts):
            first = ((place // 64 * experts + expert) * columns) * 64 + place % 64
            where = np.arange(first, first + columns * 64, 64)
            result[expert, row], used[where] = stored[where], True
    assert not stored[~used].any()
    return result.reshape(shape)
