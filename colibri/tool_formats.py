"""The formats in which models write calls of tools, and which of them a chat template speaks of."""

import json
from collections import namedtuple

from colibri.arguments import as_json, loads
from colibri.scan import Malformed

MOST = 256  # characters of a tool's name
CALL = ("<tool_call>", "</tool_call>")
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
ONE = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEP, FENCE = "<｜tool▁sep｜>", ("```json", "```")
PYTHON = ("<|python_tag|>", "<|python_start|>")

# arguments: JSON's text of an object
Call = namedtuple("Call", "name arguments")
# How a format is read. evidence: texts in a template, all of one of these tuples. marks: any of them may begin calls.
# read: a generator (scan, where a mark stands, {tool's name: its schema}) that returns ([Call], where they end) or
# raises Malformed. closing: what may stand after calls. is_bare: a whole answer may be calls without a mark
Format = namedtuple("Format", "evidence marks read closing is_bare", defaults=((), (), None, (), False))


def _checked(name):
    name = name.strip()
    if not name or len(name) > MOST or any(character in name for character in "\n<>{}"):
        raise Malformed
    return name


def _json_call(scan, at):
    """Returns (a Call that is an object with name and arguments, or parameters, where it ends)."""
    end, members = yield from scan.object(at)
    given = [name for name in ("arguments", "parameters") if name in members]
    if "name" not in members or len(given) != 1:
        raise Malformed
    name, arguments = (scan.text[slice(*members[key])] for key in ("name", given[0]))
    if not name.startswith('"'):
        raise Malformed
    if arguments.startswith('"'):  # JSON's text in a string
        arguments = json.loads(arguments)
        if not isinstance(loads(arguments), dict):
            raise Malformed
    if not arguments.lstrip().startswith("{"):
        raise Malformed
    return Call(_checked(json.loads(name)), arguments), end


def _ended(scan, at, word):
    """Returns the end of a word after blanks, or of the text, which may end before it."""
    at = yield from scan.blanks(at)
    return at if at == len(scan.text) and scan.is_over else (yield from scan.word(at, word))[1]


def hermes(scan, at, _):
    """<tool_call> {"name": ..., "arguments": {...}} </tool_call>"""
    at = yield from scan.blanks(at + len(CALL[0]))
    call, at = yield from _json_call(scan, at)
    return [call], (yield from _ended(scan, at, CALL[1]))


def qwen_xml(scan, at, tools):
    """<tool_call><function=NAME><parameter=NAME> text </parameter></function></tool_call>"""
    at = yield from scan.blanks(at + len(CALL[0]))
    _, at = yield from scan.word(at, "<function=")
    end, _ = yield from scan.until(at, (">",), MOST)
    name, at, values = _checked(scan.text[at:end]), end + 1, {}
    while True:
        at = yield from scan.blanks(at)
        word, at = yield from scan.word(at, "<parameter=", "</function>")
        if word == "</function>":
            break
        end, _ = yield from scan.until(at, (">",), MOST)
        key = scan.text[at:end].strip()
        at, _ = yield from scan.until(end + 1, ("</parameter>",))
        if key in values:
            raise Malformed
        values[key] = scan.text[end + 1:at].removeprefix("\n").removesuffix("\n")
        at += len("</parameter>")
    return [Call(name, as_json(values, tools.get(name)))], (yield from _ended(scan, at, CALL[1]))


def glm(scan, at, tools):
    """<tool_call>NAME<arg_key>NAME</arg_key><arg_value>text</arg_value></tool_call>"""
    at += len(CALL[0])
    end, _ = yield from scan.until(at, ("<arg_key>", CALL[1]), 2 * MOST)
    name, at, values = _checked(scan.text[at:end]), end, {}
    while True:
        at = yield from scan.blanks(at)
        word, at = yield from scan.word(at, "<arg_key>", CALL[1])
        if word == CALL[1]:
            return [Call(name, as_json(values, tools.get(name)))], at
        end, _ = yield from scan.until(at, ("</arg_key>",), MOST)
        key = scan.text[at:end].strip()
        at = yield from scan.blanks(end + len("</arg_key>"))
        _, at = yield from scan.word(at, "<arg_value>")
        end, _ = yield from scan.until(at, ("</arg_value>",))
        if key in values:
            raise Malformed
        values[key], at = scan.text[at:end], end + len("</arg_value>")


def mistral(scan, at, _):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...}"""
    at = yield from scan.blanks(at + len("[TOOL_CALLS]"))
    if scan.text[at:at + 1] != "[":
        end, word = yield from scan.until(at, ("[ARGS]", "[CALL_ID]", "{"), MOST)
        name, at = _checked(scan.text[at:end]), end + len(word) * (word != "{")
        if word == "[CALL_ID]":
            at = (yield from scan.until(at, ("[ARGS]",), MOST))[0] + len("[ARGS]")
        begin = yield from scan.blanks(at)
        end, _ = yield from scan.object(begin)
        return [Call(name, scan.text[begin:end])], end
    calls, word = [], "["
    while word != "]":
        at = yield from scan.blanks(at + 1)
        call, at = yield from _json_call(scan, at)
        calls.append(call)
        at = yield from scan.blanks(at)
        word, _ = yield from scan.word(at, ",", "]")
    return calls, at + 1


def llama(scan, at, tools):
    """{"name": ..., "parameters": {...}}, several with ; between, up to the end; perhaps after a tag of Python's."""
    mark = next((mark for mark in PYTHON if scan.text.startswith(mark, at)), "")
    at = yield from scan.blanks(at + len(mark))
    calls = []
    while True:
        call, at = yield from _json_call(scan, at)
        if not mark and call.name not in tools:
            raise Malformed  # an answer that is JSON need not be a call
        calls.append(call)
        at = yield from scan.blanks(at)
        if at == len(scan.text):
            return calls, at
        word, _ = yield from scan.word(at, ";", "{", "<|python_end|>")
        if word == "<|python_end|>":
            return calls, at + len(word)
        at = at if word == "{" else (yield from scan.blanks(at + 1))


def deepseek(scan, at, _):
    """A call within CALLS: ONE function SEP NAME ```json {...} ```, or ONE NAME SEP {...}"""
    if scan.text.startswith(CALLS[0], at):
        at = yield from scan.blanks(at + len(CALLS[0]))
    _, at = yield from scan.word(at, ONE[0])
    end, _ = yield from scan.until(at, (SEP,), MOST)
    name, at = _checked(scan.text[at:end]), (yield from scan.blanks(end + len(SEP)))
    is_fenced = scan.text[at:at + 1] != "{"
    if is_fenced:
        if name != "function":
            raise Malformed
        end, _ = yield from scan.until(at, ("\n",), MOST)
        name, at = _checked(scan.text[at:end]), (yield from scan.blanks(end))
        _, at = yield from scan.word(at, FENCE[0])
        at = yield from scan.blanks(at)
    end, _ = yield from scan.object(at)
    call, at = Call(name, scan.text[at:end]), (yield from scan.blanks(end))
    if is_fenced:
        at = yield from scan.blanks((yield from scan.word(at, FENCE[1]))[1])
    return [call], (yield from scan.word(at, ONE[1]))[1]


# In the order in which a template is asked for them.
FORMATS = {
    "harmony": Format((("<|channel|>", "<|message|>"),)),  # a whole answer is of it: colibri.parts
    "deepseek": Format(((ONE[0], FENCE[0]),), (CALLS[0], ONE[0]), deepseek, (CALLS[1],)),
    "deepseek-v3.1": Format(((ONE[0],),), (CALLS[0], ONE[0]), deepseek, (CALLS[1],)),
    "glm": Format(((CALL[0], "<arg_key>"),), CALL[:1], glm),
    "qwen-xml": Format(((CALL[0], "<function=", "<parameter="),), CALL[:1], qwen_xml),
    "mistral-args": Format((("[TOOL_CALLS]", "[ARGS]"),), ("[TOOL_CALLS]",), mistral),
    "mistral": Format((("[TOOL_CALLS]",),), ("[TOOL_CALLS]",), mistral),
    "hermes": Format(((CALL[0],),), CALL[:1], hermes),
    "llama": Format(((PYTHON[0],), (PYTHON[1],), ("function name", '"parameters"')), PYTHON, llama, is_bare=True)}


def format_of(template):
    """Returns the name of the format that a template's text speaks of, or None."""
    return next((name for name, form in FORMATS.items()
                 if any(all(text in template for text in texts) for texts in form.evidence)), None)
