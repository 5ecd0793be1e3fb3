"""Reads the pickle inside a checkpoint without executing anything: an allow-list machine with an explicit stack.

Names of functions and classes become inert tokens, a tensor becomes a `Rebuilt` description, an object of a class on
the list becomes `Opaque`, and everything else is None, bool, int, float, str, bytes, list (also for a set), tuple or
dict. Nothing is imported, hashed deeply, compared or printed, so neither depth nor sharing inside a hostile file costs
time.
"""

import struct

from colibri.errors import ColibriError
from converter import pickle_names
from converter.pickle_names import Class, Function, Opaque, Rebuilt, StorageRef, StorageType
from converter.zip_reader import shown

MAX_LONG_BYTES = 255
MAX_ARGUMENTS = 16  # of a call; no function on the list takes as many
NEWOBJ, NEWOBJ_EX = 0x81, 0x92
MARK = object()


class PickleReader:
    """Reads one pickle in `data`, from `position` on.

    After load(), `position` is behind its STOP, and `storages` has each StorageRef of it, those in dropped objects too.
    """

    def __init__(self, data, where, position=0, max_opcodes=2_000_000):
        """Takes the bytes. `where` names the pickle in errors.

        max_opcodes: bounds time and memory, which grow with each opcode, or with what an opcode charges.
        """
        self.data, self.where, self.position, self.max_opcodes = data, where, position, max_opcodes
        self.stack, self.memo, self.storages, self.charged = [], {}, [], 0

    def load(self):
        """Returns the pickled value. Raises ColibriError on anything that is corrupt or not on the allow-list."""
        try:
            while True:
                self._charge(1)
                opcode = self._take(1)[0]
                if opcode == ord("."):
                    return self._pop()
                if opcode not in OPCODES:
                    raise self._forbidden_opcode(opcode)
                OPCODES[opcode](self)
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
            cause = f"{type(error).__name__} at byte {self.position}"
            raise ColibriError(self.where, f"corrupt pickle ({cause})", "what torch.save writes",
                               "save or download the checkpoint again") from None

    def _charge(self, steps):
        """Counts the steps that an opcode takes."""
        self.charged += steps
        if self.charged > self.max_opcodes:
            raise ColibriError(self.where, f"more than {self.max_opcodes} pickle opcodes", "a dict of tensors",
                               "save model.state_dict() alone")

    def _forbidden_opcode(self, opcode):
        what = f"forbidden opcode 0x{opcode:02x} at byte {self.position - 1}"
        if opcode == ord("i"):  # INST: builds an instance of a class that it names
            what = f"forbidden opcode INST of {shown(self._line())}.{shown(self._line())}"
        return ColibriError(self.where, what, "what torch.save writes",
                            "do not load this file elsewhere unless you trust it")

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

    def _tuple(self, count):
        values = [self._pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def _set_items(self, values):
        if len(values) % 2:
            raise ValueError
        if self._holds(dict):
            self.stack[-1].update((pickle_names.key_of(values[i]), values[i + 1]) for i in range(0, len(values), 2))

    def _extend(self, values):
        if self._holds(list):
            self.stack[-1].extend(values)

    def _holds(self, kind):
        """Returns whether the top takes items of a kind. An object whose contents are dropped takes none."""
        if type(self.stack[-1]) not in (kind, Opaque):
            raise TypeError
        return type(self.stack[-1]) is kind

    def _set_item(self):
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _global(self, module, name):
        if type(module) is not str or type(name) is not str:
            raise TypeError
        value = pickle_names.token(module, name)
        if value is None:
            raise ColibriError(self.where, f"forbidden global {shown(module)}.{shown(name)}", "tensors in dicts alone",
                               "save model.state_dict(), and do not load this file elsewhere unless you trust it")
        self.stack.append(value)

    def _stack_global(self):
        name, module = self._pop(), self._pop()
        self._global(module, name)

    def _reduce(self):
        arguments, function = self._pop(), self._pop()
        if function is pickle_names.FROM_TYPE:
            function, kind, arguments, state = arguments
            rebuilt = self._with_attributes(self._call(function, arguments), state)
            self.stack.append(rebuilt if kind is pickle_names.TENSOR or rebuilt.problem
                              else Rebuilt("a tensor subclass"))
        else:
            self.stack.append(self._call(function, arguments))

    def _call(self, function, arguments):
        if type(function) not in (Class, Function) or type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise TypeError
        if type(function) is Class:
            return pickle_names.instance(function, *arguments)
        if function is pickle_names.PARAMETER_WITH_STATE:
            return self._with_attributes(function.build(*arguments), arguments[3])
        if function is pickle_names.ORDERED_DICT and arguments:  # pairs may be in the memo, their opcodes charged once
            self._charge(len(arguments[0]))
        return function.build(*arguments)

    def _new_object(self, opcode):
        keywords = self._pop() if opcode == NEWOBJ_EX else {}
        arguments, kind = self._pop(), self._pop()
        if type(kind) is not Class:
            raise self._forbidden_opcode(opcode)
        if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise TypeError
        self.stack.append(pickle_names.instance(kind, *arguments, keywords or None))

    def _build(self):
        state = self._pop()  # a dict's state (_metadata) is not weights
        if type(self.stack[-1]) is Rebuilt:
            if self._with_attributes(self.stack[-1], state) is not self.stack[-1]:
                raise TypeError  # no torch of today writes this
        elif type(self.stack[-1]) not in (dict, Opaque):
            raise TypeError

    def _with_attributes(self, rebuilt, state):
        """Returns a tensor that has Python attributes, or a problem where one of them could stand for its numbers."""
        if type(rebuilt) is not Rebuilt:
            raise TypeError
        if rebuilt.problem:
            return rebuilt
        seen, queue = set(), [state]
        while queue:
            item = queue.pop()
            self._charge(1)
            if type(item) in (Rebuilt, StorageRef) or item is pickle_names.NUMPY_ARRAY:
                return Rebuilt("a tensor with other tensors in its attributes")
            if type(item) in (dict, list, tuple) and id(item) not in seen:
                seen.add(id(item))
                queue.extend(item.values() if type(item) is dict else item)
        return rebuilt

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
        self.storages.append(StorageRef(storage_type.dtype, key, numel, view_offset, view_numel))
        self.stack.append(self.storages[-1])

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
    "\x96": lambda r: r.stack.append(bytes(r._take(r._number("<Q")))),  # a bytearray
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
    "\x81": lambda r: r._new_object(NEWOBJ),
    "\x92": lambda r: r._new_object(NEWOBJ_EX),
    "b": PickleReader._build,
    "Q": PickleReader._persistent,
}.items()}
