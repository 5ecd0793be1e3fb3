"""Maps a .bin and validates everything in it before anything else looks at it; yields named read-only views.

The data's own checksums are not verified here: that would read the whole file, and a model starts by reading only
the pages that its first tokens touch. The converter computes them; header and directory are verified always.
"""

import errno
import itertools
import math
import mmap
import os
import stat
import zlib

import numpy as np

from colibri import headers, settings
from colibri.errors import ColibriError

FLAGS = ("gated", "router_bias", "renormalize", "tied_embeddings", "qkv_bias", "attention_out_bias", "sinks",
         "norm_bias", "router_logit_bias", "expert_bias", "shared_gate", "ffn_out_bias", "lm_head_bias")
FLOATS = ("routed_scaling", "norm_eps", "rope_theta", "attention_scale", "clip_qkv", "rope_attention_factor",
          "rope_long_attention_factor", "rope_dynamic_factor",
          "renormalize_min", "router_jitter", "swiglu_alpha", "swiglu_limit", "final_norm_eps", "latent_norm_eps",
          "embedding_multiplier", "residual_multiplier", "logits_multiplier")
SECTIONS = ("tokenizer", "settings")  # of bytes, behind the tensors
STORED = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}  # bf16 as its bits; else bytes


class Checkpoint:
    """A model file, mapped read-only.

    path:         the file's name as given
    header:       BinHeader's fields, {"hidden": 128, ...}
    header_bytes: the 512 bytes of it
    data:         the whole file, uint8 (file_bytes,), read-only
    eos:          the tokens that end a text, [2, ...]
    bos:          the token that begins a prompt even where tokenizer.json does not put it there, or None
    tokenizer:    the tokenizer.json in the file, bytes; None where there is none
    settings:     Settings: chat templates, special tokens, sampling
    tensors:      {"layers.0.router": flat read-only array of the stored elements, panel padding included, ...}; of
                  weights of few bits, their bytes
    scales:       {"layers.0.qkv": 0.125, ...}, of the tensors in int8 and int4
    Raises ColibriError for whatever is wrong with the file.
    """

    def __init__(self, path):
        try:
            self.path = os.fsdecode(path)
        except TypeError:
            raise ColibriError("model", str(path), "the name of a file") from None
        if not self.path:
            raise ColibriError("model", "''", "the name of a file")
        self._headers = headers.default()
        self._constants = self._headers.constants
        self.data = _map(self.path)
        self.header = self._read_header()
        directory = self._read_directory()
        self._check_values()
        self.scales = {}
        self.tensors = self._read_tensors(directory)
        self.weight_bytes = sum(view.nbytes for view in self.tensors.values())
        self._check_layout(directory)
        self.eos = self.header["eos_ids"][:self.header["num_eos"]]
        self.bos = self.header["bos_id"] if self.header["add_bos"] else None
        self.tokenizer = self._read_section("tokenizer")
        self.settings = settings.read(self._read_section("settings"), self.path)

    def fail(self, got, expected=None, fix="the file is damaged, convert again"):
        raise ColibriError(self.path, got, expected, fix)

    def expect(self, condition, name, got, expected, fix="the file is damaged, convert again"):
        if not condition:
            self.fail(f"{name}={got}", expected, fix)

    def _read_header(self):
        struct = self._headers.structs["BinHeader"]
        size = len(self.data)
        start = self.data[:8].tobytes()
        self.expect(start[:4] == b"COLI"[:len(start)], "magic", repr(start[:4])[1:], "'COLI'",
                    "not a Colibri model, make one with python -m converter")
        version = int.from_bytes(start[4:], "little")
        if len(start) == 8 and version == 1:
            self.fail("version=1", 2, "it has no dimensions in it, so upgrade it with "
                      f"python -m converter {self.path} new.bin --hidden H --ffn F --activation NAME "
                      "--renormalize (or --no-renormalize)")
        if len(start) == 8 and version != self._constants["FORMAT_VERSION"]:
            self.fail(f"version={version}, this build reads 1 and 2", fix="convert again with this converter")
        self.expect(size >= struct.itemsize, "size", size, f"at least {struct.itemsize} bytes",
                    "the file is cut off, convert again")
        self.header_bytes = self.data[:struct.itemsize].tobytes()
        record = np.frombuffer(self.header_bytes, struct)[0]
        header = {name: record[name].tolist() for name in struct.names if name != "reserved"}
        self.expect(not record["reserved"].any(), "reserved", "not zero", 0)
        self.expect(header["header_bytes"] == struct.itemsize, "header_bytes", header["header_bytes"], struct.itemsize)
        self.expect(header["file_bytes"] == size, "size", size, f"{header['file_bytes']} bytes from the header",
                    "the file is cut off or has grown, convert again")
        return header

    def _read_directory(self):
        """Checks bounds and checksum, and returns the directory as a structured array (num_tensors,)."""
        struct = self._headers.structs["BinTensor"]
        offset, count = self.header["directory_offset"], self.header["num_tensors"]
        most = self._constants["MAX_TENSORS"]
        self.expect(count <= most, "num_tensors", count, f"at most {most}")
        end = offset + count * struct.itemsize
        self.expect(offset >= len(self.header_bytes) and end <= len(self.data), "directory", f"bytes {offset} to {end}",
                    f"inside the file's bytes {len(self.header_bytes)} to {len(self.data)}")
        field = self._headers.structs["BinHeader"].fields["header_crc32"][1]
        blank = self.header_bytes[:field] + bytes(4) + self.header_bytes[field + 4:]
        checksum = zlib.crc32(self.data[offset:end], zlib.crc32(blank))
        self.expect(checksum == self.header["header_crc32"], "header_crc32", f"0x{checksum:08x}",
                    f"0x{self.header['header_crc32']:08x}", "header or directory is damaged, convert again")
        return self.data[offset:end].view(struct)

    def _check_values(self):
        """Checks the header's values against what a library can be built for."""
        header = self.header
        for name, prefix in (("activation", "ACTIVATION"), ("router_kind", "ROUTER"), ("norm_kind", "NORM"),
                             ("rope_kind", "ROPE"), ("attention_kind", "ATTENTION"), ("qk_norm", "QK_NORM")):
            codes = self._headers.codes(prefix)
            known = ", ".join(f"{code} ({kind})" for kind, code in codes.items())
            self.expect(header[name] in codes.values(), name, header[name], f"one of {known}")
        for name in FLAGS:
            self.expect(header[name] in (0, 1), name, header[name], "0 or 1")
        self.expect(header["num_layers"] >= 1, "num_layers", header["num_layers"], "at least 1")
        for name in FLOATS:
            self.expect(math.isfinite(header[name]) and header[name] >= 0, name, header[name], "a finite number")
        rows = self._constants["PANEL_ROWS"]
        if header["norm_kind"]:
            self.expect(header["norm_eps"] > 0, "norm_eps", header["norm_eps"], "more than 0")
        if header["rope_kind"]:
            self.expect(header["rope_theta"] > 0, "rope_theta", header["rope_theta"], "more than 0")
        self.expect(header["interleave_rows"] == rows, "interleave_rows", header["interleave_rows"], rows)
        if broken := self._headers.broken_rule(header):
            field, rule = broken
            self.expect(False, field, header[field], rule)
        self._check_rope(header)
        self._check_layers(header)
        self._check_text(header)

    def _check_rope(self, header):
        """Checks what the kinds of rope need whose frequencies depend on a length."""
        is_long, is_dynamic = (header["rope_kind"] == self._constants[f"ROPE_{name}"] for name in ("LONG", "DYNAMIC"))
        if is_long or is_dynamic:
            self.expect(header["rope_original_positions"] >= 1, "rope_original_positions",
                        header["rope_original_positions"], "at least 1 with rope_kind=long or dynamic")
        if is_dynamic:
            self.expect(header["rope_dynamic_factor"] >= 1, "rope_dynamic_factor", header["rope_dynamic_factor"],
                        "at least 1 with rope_kind=dynamic")

    def _check_layers(self, header):
        """Checks the sets of layers, and what those need."""
        layers = header["num_layers"]
        for name, needs in (("window_layers", "window"), ("dense_layers", "dense_ffn")):
            chosen = [layer for layer in range(128) if headers.in_mask(header[name], layer)]
            self.expect(not chosen or chosen[-1] < layers, name, chosen and chosen[-1], f"below num_layers={layers}")
            self.expect(not chosen or header[needs], needs, header[needs], f"at least 1, for the layers of {name}")
        bare = header["num_heads"] == 0
        self.expect(not bare or not any(header["dense_layers"]), "dense_layers", "some", "none in a bare stack")
        self.expect(header["window"] < 1 << 31, "window", header["window"], "below 2^31")

    def _check_text(self, header):
        """Checks the tokens that begin a prompt and that end a text."""
        self.expect(header["num_eos"] <= len(header["eos_ids"]), "num_eos", header["num_eos"],
                    f"at most {len(header['eos_ids'])}")
        vocab_size, bos = header["vocab_size"], header["bos_id"]
        self.expect(header["add_bos"] in (0, 1), "add_bos", header["add_bos"], "0 or 1")
        self.expect(bos < vocab_size if header["add_bos"] else bos == 0, "bos_id", bos,
                    f"below vocab_size={vocab_size}" if header["add_bos"] else "0 without add_bos")

    def _read_tensors(self, directory):
        """Compares the directory with the tensors that such a header implies, and returns {name: view}."""
        found = {}
        for entry in directory:
            name = entry["name"].decode("latin-1")
            if name in found:
                self.fail(f"{name!r} is in the directory twice", "once")
            found[name] = entry
        layers = self.header["num_layers"]
        self.expect(layers <= len(found), "num_layers", layers, f"no more than the {len(found)} tensors of the file")
        tensors = {}
        for tensor in self._headers.tensors(self.header):
            if tensor.name not in found:
                self.fail(f"{tensor.name} is missing", f"shape {tensor.shape}", "convert again")
            tensors[tensor.name] = self._view(tensor, found.pop(tensor.name))
        if found:
            self.fail(f"{next(iter(found))!r} is not a tensor of such a model", fix="convert again")
        return tensors

    def _view(self, tensor, entry):
        form = headers.form_of(tensor.type, self.header)
        names = {code: name for name, code in self._headers.codes("DTYPE").items()}
        kind, got = names[form.dtype].upper(), entry["dtype"].item()
        got = names[got].upper() if got in names else got
        scale, has_scale = entry["scale"].item(), headers.has_scale(form.dtype)
        rank, offset, size = (entry[name].item() for name in ("rank", "offset", "bytes"))
        shape = tuple(entry["shape"].tolist())
        padded = tensor.shape + (0,) * (len(shape) - len(tensor.shape))
        expected_bytes = headers.stored_bytes(tensor, self.header)
        alignment = self._constants["DATA_ALIGNMENT"]
        for good, name, value, expected in (
                (got == kind, "dtype", got, kind),
                (0 < scale < math.inf if has_scale else scale == 0, "scale", scale,
                 f"a finite number above 0 with {kind}" if has_scale else f"0 with {kind}"),
                (rank == len(tensor.shape), "rank", rank, len(tensor.shape)),
                (shape == padded, "shape", shape[:min(rank, len(shape))], tensor.shape),
                (size == expected_bytes, "bytes", size, expected_bytes),
                (offset % alignment == 0, "offset", offset, f"a multiple of {alignment}"),
                (offset + size <= len(self.data), "offset", offset,
                 f"at most {len(self.data) - size} for {size} bytes in a file of {len(self.data)}")):
            self.expect(good, f"{tensor.name}: {name}", value, expected)
        if has_scale:
            self.scales[tensor.name] = scale
        return self.data[offset:offset + size].view(STORED.get(names[form.dtype], np.uint8))

    def _check_layout(self, directory):
        """Checks that there is no overlap, and no hole beyond what alignment needs."""
        start, count = self.header["directory_offset"], self.header["num_tensors"]
        regions = [(0, len(self.header_bytes), "the header"),
                   (start, start + count * directory.dtype.itemsize, "the directory")]
        regions += [(entry["offset"].item(), entry["offset"].item() + entry["bytes"].item(),
                     entry["name"].decode("latin-1")) for entry in directory]
        alignment = self._constants["DATA_ALIGNMENT"]
        for name in SECTIONS:
            offset, size = self.header[f"{name}_offset"], self.header[f"{name}_bytes"]
            if offset or size:
                self.expect(offset % alignment == 0 and offset + size <= len(self.data), f"{name}_offset", offset,
                            f"a multiple of {alignment}, and {size} bytes from there within the file's "
                            f"{len(self.data)}")
                regions.append((offset, offset + size, f"the {name}"))
        regions = sorted(regions) + [(len(self.data), len(self.data), "the end of the file")]
        for (_, end, name), (start, _, following) in itertools.pairwise(regions):
            if start < end:
                self.fail(f"{following} begins at byte {start}", f"at or after byte {end}, where {name} ends")
            if start - end >= alignment:
                self.fail(f"{start - end} bytes between {name} and {following} belong to nothing",
                          f"fewer than {alignment}")

    def _read_section(self, name):
        """Returns the bytes of one of SECTIONS; None where there are none."""
        start, size, crc32 = (self.header[f"{name}_{field}"] for field in ("offset", "bytes", "crc32"))
        if not size:
            return None
        data = self.data[start:start + size].tobytes()
        self.expect(zlib.crc32(data) == crc32, f"{name}_crc32", f"0x{zlib.crc32(data):08x}", f"0x{crc32:08x}",
                    f"the {name} {'is' if name == 'tokenizer' else 'are'} damaged, convert again")
        return data


def _map(path):
    """Returns the file as a read-only uint8 array over a shared mapping."""
    try:
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):
            raise ColibriError(path, f"a {'directory' if stat.S_ISDIR(kind) else 'special file'}", "a model file",
                               "name a .bin that python -m converter wrote")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ColibriError(path, "size=0", "a model", "the file is empty, convert again")
            return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise ColibriError(path, "not found", "a model file",
                           f"make one with python -m converter checkpoint.pt {path}") from None
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise ColibriError(path, error.strerror, f"room for a mapping of {size} bytes",
                               "raise the limit of the process's memory (ulimit -v)") from None
        reason = getattr(error, "strerror", None) or error
        raise ColibriError(path, reason, "a readable model file", "check its permissions") from None
