"""Reads the pickle inside a checkpoint without executing anything: an allow-list machine with an explicit stack.

Names of functions and classes become inert tokens, a tensor becomes a `Rebuilt` description, and everything else is
None, bool, int, float, str, bytes, list (also for a set), tuple or dict. Nothing is imported, hashed deeply, compared
or printed, so neither depth nor sharing inside a hostile file costs time.
"""

import struct
from collections import namedtuple

from colibri.errors import ColibriError
from converter.zip_reader import shown

MAX_LONG_BYTES = 255
MAX_ARGUMENTS = 16  # of a call, more than any of ALLOWED takes
SCALAR_KEYS = (str, int, float, bool, bytes, type(None))

StorageRef = namedtuple("StorageRef", "dtype key numel view_offset view_numel")
Rebuilt = namedtuple("Rebuilt", "problem storage offset shape strides dtype", defaults=[None] * 5)
StorageType = namedtuple("StorageType", "dtype")
DType = namedtuple("DType", "name")
Inert = namedtuple("Inert", "name")
Function = namedtuple("Function", "build")
MARK = object()

STORAGES = {"FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
            "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
            "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
            "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8",
            "QUInt8Storage": "quint8", "QInt32Storage": "qint32"}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
          "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "float8_e8m0fnu", "qint8", "quint8", "qint32")


def _tensor(storage, offset, shape, strides, *rest):
    return Rebuilt(None, storage, offset, shape, strides)


def _tensor_v3(storage, offset, shape, strides, requires_grad, hooks, dtype, *rest):
    if type(dtype) is not DType:
        raise TypeError
    return Rebuilt(None, storage, offset, shape, strides, dtype.name)


def _ordered_dict(pairs):
    return {_key(key): value for key, value in pairs}


def _key(key):
    """A dict key that is cheap to hash: a tuple could be a tower of shared tuples."""
    return key if type(key) in SCALAR_KEYS else object()


ORDERED_DICT = Function(_ordered_dict)
FROM_TYPE = Function(None)  # calls another function, for a subclass of Tensor
ALLOWED = {
    ("collections", "OrderedDict"): ORDERED_DICT,
    ("torch._utils", "_rebuild_tensor"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Function(lambda data, *rest: data),
    ("torch._utils", "_rebuild_parameter_with_state"): Function(lambda data, *rest: data),
    ("torch._tensor", "_rebuild_from_type_v2"): FROM_TYPE,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): Function(lambda *rest: Rebuilt("a meta tensor")),
    ("torch._utils", "_rebuild_qtensor"): Function(lambda *rest: Rebuilt("a quantized tensor")),
    ("torch._utils", "_rebuild_sparse_tensor"): Function(lambda *rest: Rebuilt("a sparse tensor")),
    ("torch._utils", "_rebuild_nested_tensor"): Function(lambda *rest: Rebuilt("a nested tensor")),
    ("torch", "Size"): Function(lambda shape=(): shape),
    ("torch", "device"): Function(lambda *rest: None),
    ("torch.storage", "UntypedStorage"): StorageType("uint8"),
    **{("torch", name): StorageType(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): DType(name) for name in DTYPES},
    **{("torch", name): Inert(name) for name in (
        "Tensor", "strided", "sparse_coo", "sparse_csr", "per_tensor_affine", "per_tensor_symmetric",
        "per_channel_affine", "per_channel_symmetric")},
    ("torch._tensor", "Tensor"): Inert("Tensor"),
    ("torch.nn.parameter", "Parameter"): Inert("Parameter"),
    ("torch.nn.parameter", "Buffer"): Inert("Buffer"),
}


class PickleReader:
    """One pickle in `data` from `position` on; after load(), `position` is behind its STOP."""

    def __init__(self, data, where, position=0, max_opcodes=2_000_000):
        """where: names the pickle in errors. max_opcodes: bounds time and memory, which grow with each opcode, or
        with what an opcode charges."""
        self.data, self.where, self.position, self.max_opcodes = data, where, position, max_opcodes
        self.stack, self.memo, self.charged = [], {}, 0

    def load(self):
        """The pickled value; ColibriError on anything that is corrupt or not on the allow-list."""
        try:
            while self.charged < self.max_opcodes:
                self.charged += 1
                opcode = self._take(1)[0]
                if opcode == ord("."):
                    return self._pop()
                if opcode not in OPCODES:
                    raise self._forbidden_opcode(opcode)
                OPCODES[opcode](self)
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
            cause = f"{type(error).__name__} at byte {self.position}"
            raise ColibriError(f"{self.where}: corrupt pickle ({cause}), expected what torch.save writes; "
                               "save or download the checkpoint again") from None
        raise ColibriError(f"{self.where}: more than {self.max_opcodes} pickle opcodes, expected a dict of tensors; "
                           "save model.state_dict() alone")

    def _forbidden_opcode(self, opcode):
        what = f"forbidden opcode 0x{opcode:02x} at byte {self.position - 1}"
        if opcode == ord("i"):  # INST: builds an instance of a class that it names
            what = f"forbidden opcode INST of {self._line()}.{self._line()}"
        return ColibriError(f"{self.where}: {what}, expected what torch.save writes; do not load this file elsewhere "
                            "unless you trust it")

    def _take(self, count):
        piece = self.data[self.position:self.position + count]
        if len(piece) != count:
            raise IndexError
        self.position += count
        return piece

    def _number(self, form):
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self):
        end = self.data.find(b"\n", self.position, self.position + 1024)
        if end < 0:
            raise ValueError
        return str(self._take(end + 1 - self.position)[:-1], "utf-8")

    def _pop(self):
        value = self.stack.pop()
        if value is MARK:
            raise IndexError
        return value

    def _to_mark(self):
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is MARK:
                values = self.stack[start + 1:]
                del self.stack[start:]
                return values
        raise IndexError

    def _top(self, kind):
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def _tuple(self, count):
        values = [self._pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def _set_items(self, values):
        if len(values) % 2:
            raise ValueError
        self._top(dict).update((_key(values[i]), values[i + 1]) for i in range(0, len(values), 2))

    def _extend(self, values):
        self._top(list).extend(values)

    def _set_item(self):
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _global(self, module, name):
        if type(module) is not str or type(name) is not str:
            raise TypeError
        if (module, name) not in ALLOWED:
            raise ColibriError(f"{self.where}: forbidden global {shown(module)}.{shown(name)}, expected tensors in "
                               "dicts alone; save model.state_dict(), and do not load this file elsewhere unless you "
                               "trust it")
        self.stack.append(ALLOWED[module, name])

    def _stack_global(self):
        name, module = self._pop(), self._pop()
        self._global(module, name)

    def _reduce(self):
        arguments, function = self._pop(), self._pop()
        if function is FROM_TYPE:
            function, _, arguments, _ = arguments
        if type(function) is not Function or type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise TypeError
        if function is ORDERED_DICT:  # its pairs may be in the memo, and their opcodes charged once
            pairs = arguments[0] if arguments else ()
            self.charged += len(pairs)
            if self.charged > self.max_opcodes:
                pairs = ()  # load() ends here
            arguments = (pairs,)
        self.stack.append(function.build(*arguments))

    def _build(self):
        self._pop()  # attributes of a state dict (_metadata) or of a tensor: not weights
        if type(self.stack[-1]) not in (dict, Rebuilt):
            raise TypeError

    def _persistent(self):
        reference = self._pop()
        if len(reference) > MAX_ARGUMENTS:
            raise TypeError
        kind, storage_type, key, _, numel, *view = reference
        if (kind != "storage" or type(storage_type) is not StorageType or type(key) is not str
                or type(numel) is not int):
            raise TypeError
        view_offset, view_numel = (0, numel) if not view or view[0] is None else view[0][1:]
        if type(view_offset) is not int or type(view_numel) is not int:
            raise TypeError
        self.stack.append(StorageRef(storage_type.dtype, key, numel, view_offset, view_numel))

    def _long(self, count):
        if count > MAX_LONG_BYTES:
            raise ValueError
        self.stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _protocol(self):
        if not 2 <= self._number("<B") <= 5:
            raise ValueError

    def _string(self, form, encoding="utf-8"):
        self.stack.append(str(self._take(self._number(form)), encoding, "surrogatepass"))


def _push(value):
    return lambda r: r.stack.append(value)


OPCODES = {ord(opcode): action for opcode, action in {
    "\x80": PickleReader._protocol,
    "\x95": lambda r: r._number("<Q"),  # FRAME
    "(": _push(MARK),
    "0": lambda r: r.stack.pop(),
    "1": PickleReader._to_mark,
    "2": lambda r: r.stack.append(r.stack[-1]),
    "N": _push(None),
    "\x88": _push(True),
    "\x89": _push(False),
    "K": lambda r: r.stack.append(r._number("<B")),
    "M": lambda r: r.stack.append(r._number("<H")),
    "J": lambda r: r.stack.append(r._number("<i")),
    "G": lambda r: r.stack.append(r._number(">d")),
    "\x8a": lambda r: r._long(r._number("<B")),
    "\x8b": lambda r: r._long(r._number("<I")),
    "X": lambda r: r._string("<I"),
    "\x8c": lambda r: r._string("<B"),
    "\x8d": lambda r: r._string("<Q"),
    "U": lambda r: r._string("<B", "latin-1"),  # Python 2
    "T": lambda r: r._string("<I", "latin-1"),
    "B": lambda r: r.stack.append(bytes(r._take(r._number("<I")))),
    "C": lambda r: r.stack.append(bytes(r._take(r._number("<B")))),
    "\x8e": lambda r: r.stack.append(bytes(r._take(r._number("<Q")))),
    "}": lambda r: r.stack.append({}),
    "]": lambda r: r.stack.append([]),
    "\x8f": lambda r: r.stack.append([]),
    ")": _push(()),
    "t": lambda r: r.stack.append(tuple(r._to_mark())),
    "\x91": lambda r: r.stack.append(r._to_mark()),
    "\x85": lambda r: r._tuple(1),
    "\x86": lambda r: r._tuple(2),
    "\x87": lambda r: r._tuple(3),
    "s": PickleReader._set_item,
    "u": lambda r: r._set_items(r._to_mark()),
    "a": lambda r: r._extend([r._pop()]),
    "e": lambda r: r._extend(r._to_mark()),
    "\x90": lambda r: r._extend(r._to_mark()),
    "q": lambda r: r.memo.__setitem__(r._number("<B"), r.stack[-1]),
    "r": lambda r: r.memo.__setitem__(r._number("<I"), r.stack[-1]),
    "\x94": lambda r: r.memo.__setitem__(len(r.memo), r.stack[-1]),
    "h": lambda r: r.stack.append(r.memo[r._number("<B")]),
    "j": lambda r: r.stack.append(r.memo[r._number("<I")]),
    "c": lambda r: r._global(r._line(), r._line()),
    "\x93": PickleReader._stack_global,
    "R": PickleReader._reduce,
    "b": PickleReader._build,
    "Q": PickleReader._persistent,
}.items()}
