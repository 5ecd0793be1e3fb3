"""Turns the text of native/*.h into numpy dtypes, integers, tables and ctypes signatures.

The headers are the only definition of the file format and of the library's interface, so nothing here is retyped.
The reader asks for what the headers promise: one field or #define a line, no padding in a struct.
"""

import ast
import ctypes
import functools
import hashlib
import math
import operator
import re
from collections import namedtuple

import numpy as np

from colibri.places import NATIVE

SCALARS = {"char": "S1", "int32_t": "<i4", "int64_t": "<i8", "uint16_t": "<u2", "uint32_t": "<u4", "uint64_t": "<u8",
           "float": "<f4", "double": "<f8"}
POINTER = "<u8"
ARGUMENTS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "double": ctypes.c_double,
             "float": ctypes.c_float,
             "char *": ctypes.c_char_p, "void *": ctypes.c_void_p}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
             ast.Mod: operator.mod, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
             ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.USub: operator.neg}

Tensor = namedtuple("Tensor", "name type shape")  # type: "float", "expert_t", "dense_t", "embed_t"; shape: 1-3 ints
Form = namedtuple("Form", "dtype group zero_points")  # panels.h's
Buffer = namedtuple("Buffer", "name dtype rows columns")
Function = namedtuple("Function", "restype argtypes")


@functools.cache
def digest():
    """Returns the first 12 digits of their SHA-256, one after another, as the Makefile takes it."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(NATIVE.glob("*.h")))).hexdigest()[:12]


class Headers:
    """Holds what the headers say for one baked configuration.

    constants: {"PANEL_ROWS": 64, ...}, every #define that is an integer, under this configuration
    macros:    {"num_experts": "NUM_EXPERTS", ...}, the macro that sets each of struct Config's fields
    structs:   {"BinHeader": numpy dtype, ...}; pointers are u64
    options:   ["NUM_EXPERTS", ...], the macros that DEFINES may set
    functions: {"colibri_bind": Function(restype, argtypes), ...} in ctypes types
    """

    def __init__(self, config=None):
        """config: {"num_experts": 8, ...} overrides config.h's defaults; names are struct Config's fields, of which
        cuda_version has no macro."""
        names = "format.h", "panels.h", "config.h", "model.h", "cache.h", "colibri.h"
        sources = {name: _read(name) for name in names}
        text = _expanded("\n".join(sources.values()))
        self.tables = {name: _rows(row, body)
                       for name, row, body in re.findall(r"^#define (\w+)\(([A-Z])\) (.*)$", text, re.MULTILINE)}
        self.macros = dict(map(_columns, self.tables["CONFIG_FIELDS"]))
        self._defines = dict(re.findall(r"^#define (\w+)[ \t]+(\S.*?)[ \t]*$", text, re.MULTILINE))
        self._defines.update({self.macros[name]: str(int(value)) for name, value in (config or {}).items()
                              if name in self.macros})
        self._members = dict(re.findall(r"^#define (\w+)\(\w+,[^)]*\) (?:const )?(.*);$", text, re.MULTILINE))
        self.constants = {name: value for name in self._defines if (value := self._constant(name)) is not None}
        self.options = [name for name in re.findall(r"^#ifndef (\w+)\n#define \1 ", sources["config.h"], re.MULTILINE)
                        if name != "CUDA_ARCH"]  # which ARCH sets
        self._format = re.findall(r"^#define (\w+) ", sources["format.h"], re.MULTILINE)
        self.structs = {}
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", text, re.DOTALL):
            fields = [field for line in body.split("\n") for field in self._fields(line)]
            self.structs[name] = np.dtype(fields, align=True)
        declarations = re.findall(r"^(\w[\w ]*\*?) ?(colibri_\w+)\(([^()]*)\);", text, re.MULTILINE)
        self.functions = {name: _function(kind, arguments) for kind, name, arguments in declarations}

    def codes(self, prefix):
        """{"silu": 0, "gelu": 1, "relu": 2} for "ACTIVATION": format.h's names of a code field's values."""
        return {name[len(prefix) + 1:].lower(): self.constants[name] for name in self._format
                if name.startswith(prefix + "_")}

    def tensors(self, header):
        """Returns a model's tensors, in the file's order, as [Tensor]. header: a mapping with BinHeader's fields."""
        fields = {name: int(header[name]) for name in self.structs["BinHeader"].names
                  if self.structs["BinHeader"][name] == np.dtype("<u4")}
        tensors = [_tensor(row, fields) for row in self.tables["MODEL_TENSORS"]]
        scopes = [self.layer_scope(fields, dense) for dense in (0, 1)]
        kinds = [[_tensor(row, scope) for row in self.tables["LAYER_TENSORS"]] for scope in scopes]
        for layer in range(fields["num_layers"]):
            dense = in_mask(header["dense_layers"], layer)
            tensors += [tensor._replace(name=f"layers.{layer}.{tensor.name}") for tensor in kinds[dense] if tensor]
        return [tensor for tensor in tensors if tensor]

    def layer_scope(self, fields, dense):
        """Returns the header's fields with format.h's LAYER_VALUES, for a layer with experts or a dense one."""
        scope = {**fields, "dense": int(dense)}
        for name, expression in map(_columns, self.tables["LAYER_VALUES"]):
            scope[name] = evaluate(expression, scope)
        return scope

    def broken_rule(self, fields):
        """(field, what is expected of it) of the first of MODEL_RULES that a header's fields break; None: of none."""
        names = {**self.constants, **fields}
        for row in self.tables["MODEL_RULES"]:
            field, condition, words = _columns(row, 2)
            if not evaluate(condition, names):
                return field, words.strip('"').format_map(names)
        return None

    def cache_values(self, header, context):
        """Returns CACHE_VALUES by name, with num_layers and num_windowed.

        header: a mapping with BinHeader's fields. context: the positions of a slot
        """
        layers = int(header["num_layers"])
        names = {"context": context, "num_layers": layers, "window": int(header["window"]),
                 "num_windowed": sum(in_mask(header["window_layers"], layer) for layer in range(layers))}
        for name, expression in map(_columns, self.tables["CACHE_VALUES"]):
            names[name] = evaluate(expression, {**self.constants, **names})
        return names

    def state_buffers(self, header, num_slots, context):
        """Returns STATE_BUFFERS as [Buffer(name, numpy dtype, rows, columns)], in the order of the state block."""
        names = {**self.constants, **self.cache_values(header, context), "num_slots": num_slots}
        rows = [_columns(row) for row in self.tables["STATE_BUFFERS"]]
        return [Buffer(name, np.dtype(SCALARS[kind]), evaluate(count, names), evaluate(width, names))
                for name, kind, count, width in rows]

    def state_bytes(self, header, num_slots, context):
        """Returns (bytes of the KV cache, bytes of the other STATE_BUFFERS, a step's workspaces)."""
        sizes = {buffer.name: buffer.rows * buffer.columns * buffer.dtype.itemsize
                 for buffer in self.state_buffers(header, num_slots, context)}
        cache = sum(size for name, size in sizes.items() if name.endswith("_cache"))
        return cache, sum(sizes.values()) - cache

    def _constant(self, name, depth=0):
        """Returns a #define's integer value, following other #defines; None when it is not an integer."""
        text = self._defines[name]
        words = set(re.findall(r"[A-Za-z_]\w*", text))
        if depth > 8 or not words <= self._defines.keys():
            return None
        try:
            return evaluate(text, {word: self._constant(word, depth + 1) for word in words})
        except (SyntaxError, TypeError, KeyError):
            return None

    def _fields(self, line):
        """Returns a struct's line as (name, dtype) or (name, dtype, (length,)); a table is one such line an entry."""
        if table := re.match(r"\s*(\w+)\((\w+)\)", line):
            member, _, suffix = self._members[table[2]].partition("##")
            dtype = POINTER if "*" in member else SCALARS[member.split()[0]]
            return [(_columns(row)[0] + suffix, dtype) for row in self.tables[table[1]]]
        field = re.match(r"\s*(?:const )?(?:struct )?(\w+) (\*?)(\w+)(?:\[(.+)\])?;", line)
        if not field:
            return []
        kind, pointer, name, length = field.groups()
        dtype = POINTER if pointer else self.structs.get(kind) or SCALARS[kind]
        if length is None:
            return [(name, dtype)]
        count = evaluate(length, self.constants)
        return [(name, f"S{count}")] if kind == "char" else [(name, dtype, (count,))]


@functools.cache
def default():
    """Returns the headers of config.h's defaults: enough for everything that is about the file alone."""
    return Headers()


def form_of(kind, header):
    """Returns the Form in which a Tensor is stored, by its type. header: a mapping with BinHeader's fields."""
    if kind == "float":
        return Form(default().constants["DTYPE_F32"], 0, 0)
    name = kind.removesuffix("_t")
    dtype, group, zero_points = (int(header[f"{name}_{field}"]) for field in ("dtype", "group", "zero_points"))
    if dtype:
        return Form(dtype - 1, group, zero_points)
    return form_of("dense_t", header) if name == "embed" else Form(int(header["weight_dtype"]), 0, 0)


def is_few(dtype):
    """Returns whether weights of a DTYPE code are of few bits, in groups that share a scale."""
    return dtype >= default().constants["NUM_WIDE_DTYPES"]


def has_scale(dtype):
    """Returns whether a tensor of a DTYPE code has a scale of its own, BinTensor's."""
    return dtype in (default().constants["DTYPE_INT8"], default().constants["DTYPE_INT4"])


def panel_values(form, columns):
    """Returns PANEL_VALUES by name, for a matrix of so many columns."""
    names = {**form._asdict(), "columns": columns}
    for name, expression in map(_columns, default().tables["PANEL_VALUES"]):
        names[name] = evaluate(expression, {**default().constants, **names})
    return names


def is_gated(name, header):
    """Returns whether a tensor's gate and up rows alternate."""
    return bool(header["gated"]) and name.endswith((".experts_up", ".mlp_up"))


def stored_rows(rows, gated):
    """Rows of a matrix as stored, whole panels. gated: rows are gate and up together, each filled up to its groups."""
    panel, group = (default().constants[name] for name in ("PANEL_ROWS", "GATE_GROUP"))
    if gated:
        rows = 2 * group * -(-rows // (2 * group))
    return panel * -(-rows // panel)


def stored_bytes(tensor, header):
    """Returns how many bytes a Tensor takes in the file, panel padding included."""
    form = form_of(tensor.type, header)
    if len(tensor.shape) == 1:
        return tensor.shape[0] * panel_values(form, 1)["element_bytes"]
    *experts, rows, columns = tensor.shape
    panels = math.prod(experts) * stored_rows(rows, is_gated(tensor.name, header)) // default().constants["PANEL_ROWS"]
    return panels * panel_values(form, columns)["panel_bytes"]


def mask(layers):
    """Returns window_layers or dense_layers of a list of layers."""
    return [sum(1 << layer % 32 for layer in layers if layer // 32 == word) for word in range(4)]


def in_mask(words, layer):
    return int(layer < 128) and int(words[layer // 32]) >> layer % 32 & 1


def evaluate(expression, names):
    """Evaluates a C integer expression of + - * / % > >= < <= == != && || and one ?: in parentheses, over `names`."""
    return _evaluate(_parsed(expression), names)


@functools.cache
def _parsed(expression):
    python = re.sub(r"\(([^?()]*)\?([^:()]*):([^()]*)\)", r"((\2) if (\1) else (\3))", expression).replace("/", "//")
    python = python.replace("&&", " and ").replace("||", " or ")
    return ast.parse(python.strip(), mode="eval").body


def _evaluate(node, names):
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_evaluate(node.left, names), _evaluate(node.right, names))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_evaluate(node.operand, names))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(OPERATORS[type(node.ops[0])](_evaluate(node.left, names), _evaluate(node.comparators[0], names)))
    if isinstance(node, ast.BoolOp):
        decides = isinstance(node.op, ast.Or)  # a value like this leaves the rest unread
        return int(decides if any(bool(_evaluate(value, names)) == decides for value in node.values) else not decides)
    if isinstance(node, ast.IfExp):
        return _evaluate(node.body if _evaluate(node.test, names) else node.orelse, names)
    raise SyntaxError(f"{ast.unparse(node)}: not an integer expression")


@functools.cache
def _read(name):
    text = re.sub(r"/\*.*?\*/", "", (NATIVE / name).read_text(), flags=re.DOTALL)
    return re.sub(r"\\\n", " ", text)


def _expanded(text):
    """Returns the headers' text with FORM_RULES in the place of each of its calls, for the name that is given there."""
    body = re.search(r"^#define FORM_RULES\(R, name\) (.*)$", text, re.MULTILINE)[1]
    return re.sub(r"FORM_RULES\(R, (?!name)(\w+)\)", lambda call: body.replace("name##", call[1]), text)


def _rows(name, body):
    """Returns the arguments of each name(...) in a table's body, as text."""
    rows = []
    for call in re.finditer(rf"\b{name}\(", body):
        end, depth = call.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(body[end], 0)
            end += 1
        rows.append(body[call.end():end - 1])
    return rows


def _columns(row, most=-1):
    """Returns a row's columns; after `most` commas the rest is one."""
    return [column.strip() for column in row.split(",", most)]


def _tensor(row, fields):
    name, kind, *shape = _columns(row)
    experts, rows, columns = (evaluate(expression, fields) for expression in shape)
    if rows == 0 or (columns == 0 and shape[2] != "0") or (experts == 0 and shape[0] != "0"):
        return None
    return Tensor(name, kind, tuple(size for size in (experts, rows, columns) if size))


def _function(kind, arguments):
    arguments = [] if arguments == "void" else arguments.split(",")
    return Function(_ctype(kind), [_ctype(argument) for argument in arguments])


def _ctype(declaration):
    """Returns the ctypes type of `const char *op`, `int num_rows` or a return type."""
    kind = re.match(r"(?:const )?(\w+)\s*(\*?)", declaration.strip())
    return ARGUMENTS[f"{kind[1]} *" if kind[2] else kind[1]]
