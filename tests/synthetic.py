"""Writes random models in the .bin format from native/format.h alone, as a second opinion on the converter's writer."""

import zlib

import numpy as np
import reference
import reference_formats

from colibri import headers
from colibri.checkpoint import STORED
from colibri.headers import stored_bytes

DENSE = {"version": 2, "num_experts": 8, "k": 2, "num_layers": 2, "hidden": 64, "ffn": 40, "num_heads": 4,
         "num_kv_heads": 2, "head_dim": 16, "vocab_size": 256, "max_positions": 128, "weight_dtype": 1, "activation": 0,
         "gated": 1, "router_kind": 0, "router_bias": 0, "renormalize": 1, "num_groups": 1, "topk_groups": 1,
         "routed_scaling": 1.0, "norm_kind": 1, "norm_eps": 1e-5, "rope_kind": 1, "rope_theta": 10000.0,
         "tied_embeddings": 0, "interleave_rows": 64}
STACK = {**DENSE, "num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "vocab_size": 0, "max_positions": 0, "norm_kind": 0,
         "rope_kind": 0, "norm_eps": 0.0, "rope_theta": 0.0}


def write_model(path, shape=DENSE, seed=0, **changes):
    """A random model of that shape; vectors are near 1. Padding rows are random too: nothing may depend on them but as
    zeros in ffn."""
    structs, constants = headers.default().structs, headers.default().constants
    shape = reference.neutral({**shape, **changes})
    shape = {**dict.fromkeys(structs["BinHeader"].names, 0), "window_layers": [0] * 4, "dense_layers": [0] * 4, **shape}
    tensors = headers.default().tensors(shape)
    generator = np.random.default_rng(seed)
    directory = np.zeros(len(tensors), structs["BinTensor"])
    offset = structs["BinHeader"].itemsize + directory.nbytes
    with open(path, "wb") as file:
        for entry, tensor in zip(directory, tensors):
            offset = -(-offset // constants["DATA_ALIGNMENT"]) * constants["DATA_ALIGNMENT"]
            data = _random(tensor, shape, generator)
            entry["name"], entry["rank"], entry["offset"] = tensor.name.encode(), len(tensor.shape), offset
            entry["dtype"] = headers.form_of(tensor.type, shape).dtype
            entry["scale"] = reference_formats.SCALE * headers.has_scale(entry["dtype"])
            entry["bytes"], entry["crc32"] = data.nbytes, zlib.crc32(data)
            entry["shape"][:len(tensor.shape)] = tensor.shape
            file.seek(offset)
            file.write(data)
            offset += data.nbytes
        header = np.zeros(1, structs["BinHeader"])
        for name, value in {**shape, "magic": b"COLI", "header_bytes": header.nbytes, "file_bytes": offset,
                            "directory_offset": header.nbytes, "num_tensors": len(tensors)}.items():
            header[name] = value
        file.seek(0)
        file.write(seal(header.tobytes() + directory.tobytes()))
    return path


def seal(start):
    """The bytes of header and directory with their checksum put right."""
    field = headers.default().structs["BinHeader"].fields["header_crc32"][1]
    blank = start[:field] + bytes(4) + start[field + 4:]
    return start[:field] + zlib.crc32(blank).to_bytes(4, "little") + start[field + 4:]


def _random(tensor, shape, generator):
    form = headers.form_of(tensor.type, shape)
    if headers.is_few(form.dtype):
        *experts, rows, columns = tensor.shape
        rows = headers.stored_rows(rows, headers.is_gated(tensor.name, shape))
        return reference_formats.pack(form, *reference_formats.random_matrix(generator, form, *experts, rows, columns))
    names = {code: name for name, code in headers.default().codes("DTYPE").items()}
    stored = STORED[names[form.dtype]]
    count = stored_bytes(tensor, shape) // stored.itemsize
    if tensor.name == "rope_frequencies":
        return reference.frequencies(shape["rotary_dim"], shape["rope_theta"])
    if tensor.name == "rope_long_frequencies":
        return reference.frequencies(shape["rotary_dim"], shape["rope_theta"]) / generator.uniform(1, 8,
                                                                                                   count).astype("f")
    if len(tensor.shape) == 1:
        return 1 + generator.standard_normal(count, dtype=np.float32) / 4
    values = generator.standard_normal(count, dtype=np.float32) / np.float32(np.sqrt(tensor.shape[-1]))
    return (values.view(np.uint32) >> 16).astype(np.uint16) if stored == np.uint16 else values.astype(stored)
