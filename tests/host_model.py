"""A model on the host with random weights, whose ops run one by one."""

import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile

import numpy as np
import pytest
import reference
import reference_formats
from reference import BF16, CLAMPED_SWIGLU, F16, F32, GELU, RELU, ROUTERS, SIGMOID, SILU, TOPK_SOFTMAX, fields

from colibri import headers
from colibri.headers import NATIVE
from colibri.native import Library

ROOT = NATIVE.parent
BAKED = ("num_experts", "k", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "weight_dtype",
         "activation", "gated", "router_kind", "router_bias", "renormalize",
         "num_groups", "topk_groups", "expert_bias", *reference.FORM_FIELDS)
# A variant of the library is a compilation, so each covers several of the things to cover.
VARIANTS = {
    "two-matrix f32 gelu": fields(num_experts=1, k=1, hidden=7, ffn=9, weight_dtype=F32, activation=GELU, gated=0),
    "gated f16 silu": fields(num_experts=8, k=2, hidden=300, ffn=200, activation=SILU),
    "two-matrix bf16 relu": fields(num_experts=5, k=5, hidden=65, ffn=100, weight_dtype=BF16, activation=RELU, gated=0),
    "smallest": fields(num_experts=2, k=1, hidden=1, ffn=1, activation=GELU),
    "biases, clamped": fields(num_experts=6, k=2, hidden=65, ffn=41, weight_dtype=F32, activation=CLAMPED_SWIGLU,
                            expert_bias=1, router_kind=TOPK_SOFTMAX, router_logit_bias=1),
    "60 experts": fields(num_experts=60, k=8, hidden=65, ffn=9, weight_dtype=F32, router_kind=TOPK_SOFTMAX,
                       routed_scaling=2.5),
    "128 experts": fields(num_experts=128, k=3, hidden=33, ffn=24, weight_dtype=BF16, renormalize=0),
    "256 experts, groups": fields(num_experts=256, k=8, hidden=40, ffn=8, router_kind=SIGMOID, router_bias=1,
                                num_groups=8, topk_groups=4, routed_scaling=2.5),
}
TRANSFORMER = fields(num_layers=2, num_experts=6, k=2, hidden=72, ffn=40, num_heads=6, num_kv_heads=2, head_dim=10,
                   vocab_size=131)


@functools.cache
def library(extra="", **config):
    """The library with this configuration baked in, built if it is not yet."""
    defines = [f"-D{headers.default().macros[name]}={config[name]}" for name in BAKED if name in config]
    text = " ".join([*defines, "-DMAX_STEP_LOGITS=512", *extra.split()])
    command = ["make", "-s", "-j2", f"CONFIG={text}"]
    made = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    return Library(ROOT / "build" / f"host-{hashlib.sha256(text.encode()).hexdigest()[:12]}" / "libcolibri.so")


def with_isa(built, isa):
    """A copy of a library, loaded for that instruction set; ColibriError where this machine has not got it."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLIBRI_ISA", isa)
        copy = Library(shutil.copy(built.file, os.path.join(folder, "libcolibri.so")))
        copy.path(0)  # reads the variable, once
        return copy


def before_a_guard_page(array):
    """A copy that ends where an unreadable page begins: reading beyond it ends the process, as beyond a mapped file."""
    num_bytes = -(-array.nbytes // 4096) * 4096
    block = np.frombuffer(mmap.mmap(-1, num_bytes + 4096), np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(block.ctypes.data + num_bytes), ctypes.c_size_t(4096), 0) == 0
    copy = block[num_bytes - array.nbytes:num_bytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class HostModel:
    """A reference model in the library's memory; `state` and `batch` are NumPy views of what C works on."""

    def __init__(self, model, num_slots=2, num_threads=2, context=512, extra="", isa=None):
        bare = {} if model["num_heads"] else fields(num_heads=0, num_kv_heads=0, head_dim=0, vocab_size=0)
        config = {name: model[name] for name in BAKED} | bare
        self.library = library(extra=extra, **config)
        if isa:
            self.library = with_isa(self.library, isa)
        structs = self.library.headers.structs
        tensors = {name: before_a_guard_page(array) for name, array in reference.stored_tensors(model).items()}
        header = np.zeros(1, structs["BinHeader"])
        for name in header.dtype.names:
            if name in model:
                header[name] = model[name]
        layers = np.zeros(model["num_layers"], structs["Layer"])
        weights = np.zeros(1, structs["Weights"])
        for name, array in tensors.items():
            owner, field = (layers[int(name.split(".")[1])], name.split(".")[2]) if "." in name else (weights, name)
            owner[field] = array.ctypes.data
            kind = "expert_t" if "experts" in name else "embed_t" if owner is weights else "dense_t"
            if array.ndim > 1 and headers.has_scale(headers.form_of(kind, model).dtype) and field != "router":
                owner[f"{field}_scale"] = reference_formats.SCALE
        if model["tied_embeddings"]:
            weights["lm_head"], weights["lm_head_scale"] = weights["embed"], weights["embed_scale"]
        batch = np.zeros(1, structs["Batch"])
        block = self.library.state_bytes(0, header.ctypes.data, num_slots, context)
        memory = np.zeros(block + 4096, np.uint8)
        start = -memory.ctypes.data % 4096
        self.model = np.zeros(self.library.model_bytes(), np.uint8)
        self.keep = tensors, header, layers, weights, memory
        self.library.bind(self.model.ctypes.data, 0, header.ctypes.data, weights.ctypes.data, layers.ctypes.data,
                          memory.ctypes.data + start, batch.ctypes.data, num_slots, context, num_threads,
                          None)
        self.batch, self.state = batch[0], {}
        for buffer in self.library.headers.state_buffers(header[0], num_slots, context):
            size = buffer.rows * buffer.columns * buffer.dtype.itemsize
            view = memory[start:start + size].view(buffer.dtype)
            self.state[buffer.name] = view.reshape(buffer.rows, buffer.columns)
            start += -(-size // 4096) * 4096
        self.state["place"][:] = np.arange(model["num_experts"])

    def begin(self, num_tokens, **values):
        self.batch["num_tokens"] = num_tokens
        for name, value in values.items():
            if self.batch[name].ndim:
                self.batch[name][:len(value)] = value
            else:
                self.batch[name] = value
        self.run("begin", num_tokens)

    def run(self, op, num_rows, layer=0):
        self.library.run_op(self.model.ctypes.data, op.encode(), num_rows, layer)

    def moe(self, x):
        """x (tokens, hidden) through layer 0 of a bare stack."""
        num_tokens = len(x)
        self.state["x"][:num_tokens] = x
        self.begin(num_tokens)
        for op in ("router", "experts_up", "experts_down", "combine"):
            self.run(op, num_tokens)
        return self.state["x"][:num_tokens].copy()

    def route(self, logits):
        """Ids and weights for router logits: the router is the identity where hidden equals num_experts."""
        self.state["x"][:len(logits)] = logits
        self.begin(len(logits))
        self.run("router", len(logits))
        return self.state["expert_ids"][:len(logits)].copy(), self.state["expert_weights"][:len(logits)].copy()

    def forward(self, tokens, positions, slots):
        count = len(tokens)
        self.batch["num_tokens"] = self.batch["num_logits"] = count
        for name, values in fields(tokens=tokens, positions=positions, slots=slots, logit_rows=range(count)).items():
            self.batch[name][:count] = values
        self.library.forward(self.model.ctypes.data, count, count)
        self.library.rest()  # memory is given back at any time
        return self.state["logits"][:count].copy()


def relative_error(got, expected):
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)


def random_inputs(rng, num_tokens, hidden):
    return rng.standard_normal((num_tokens, hidden)).astype(np.float32)


@functools.cache
def host_model(name):
    model = reference.random_model(np.random.default_rng(list(VARIANTS).index(name)), **VARIANTS[name])
    return model, HostModel(model)


@functools.cache
def router_model(name):
    config = ROUTERS[name]
    model = reference.random_model(np.random.default_rng(1), hidden=config["num_experts"], ffn=8, **config)
    model["layers"][0]["router"] = np.eye(config["num_experts"], dtype=np.float32)
    return model, HostModel(model)


@functools.cache
def transformer(weight_dtype=F16, tied=0, **dtypes):
    model = reference.random_model(np.random.default_rng(9), weight_dtype=weight_dtype, tied_embeddings=tied,
                                   **dtypes, **TRANSFORMER)
    return model, HostModel(model, num_slots=3)
