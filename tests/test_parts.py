"""An answer's parts: calls in each format, thoughts and text, however it is cut; what is no call is text."""

import json
import random

import pytest
from answers import BEGIN, CALLED, CHANNEL, END, MESSAGE, ONE, OVER, SEP, WRITERS, assembled, plain, written
from conftest import DATA

from colibri import tools as tools_module
from colibri.arguments import as_json
from colibri.chat import Conversation
from colibri.parts import PIECE, Parts
from colibri.reading import Reading
from colibri.refused import Refused
from colibri.scan import MAX_DEPTH
from colibri.tool_formats import FORMATS, format_of

NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in {
    "city": "string", "days": "integer", "deep": "object", "all": "array", "exact": "boolean", "none": "null",
    "share": "number"}.items()}}
TOOLS = {"get_weather": SCHEMA, "now": None, "näher-2": SCHEMA}
THINK = ("<think>", "</think>")
FORMS = [*WRITERS, "harmony"]
BITS = ["<", ">", "</", "tool", "_call>", "{", "}", "[", "]", '"', "\\", "a", "é", "\U0001f600", " ", "\n", "<|", "|>",
        "think", "ARGS", "name", "```", ";", "=", "function", "\n\n", "<tool", "[TOOL", "<｜tool", ":", ","]
UNSAFE = ("</parameter>", "</arg_value>", "<tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "<|python_tag|>", BEGIN,
          ONE)


def text_of(source, count):
    text = "".join(source.choice(BITS) for _ in range(source.randrange(count)))
    return "x" if any(mark in text for mark in UNSAFE) else text


def arguments_of(source):
    makers = {"city": lambda: text_of(source, 9).strip("\n"), "days": lambda: source.randrange(-9, 10 ** 20),
              "deep": lambda: {text_of(source, 4): [1.5, None, {"b": text_of(source, 5)}]},
              "all": lambda: [text_of(source, 4), -0.25, True], "exact": lambda: source.random() < 0.5,
              "none": lambda: None, "share": lambda: source.random()}
    return {name: makers[name]() for name in source.sample(sorted(makers), source.randrange(len(makers)))}


def told(form, text, cuts, hidden=(), **more):
    """(the Parts of a text that is cut there, the deltas)."""
    parts = Parts(form, more.pop("tools", TOOLS), THINK if form != "harmony" else None, **more)
    deltas = [delta for begin, end in zip([0, *cuts], [*cuts, len(text)])
              for delta in parts.add(text[begin:end], [span for span in hidden if span[0] < end])]
    return parts, deltas + parts.rest("", hidden)


def every_way(form, text, source=None, **more):
    """The message of a text, the same whether it comes whole, in characters, or cut anywhere."""
    whole = plain(told(form, text, [], **more)[0].message())
    ways = [[], list(range(1, len(text))), *([place] for place in range(1, len(text)))]
    if source:
        ways = ways[:2] + [sorted(source.sample(range(len(text) + 1), min(len(text), 6))) for _ in range(4)]
    for cuts in ways:
        parts, deltas = told(form, text, cuts, **more)
        assert assembled(deltas) == plain(parts.message()) == whole, cuts
    return whole


def message(content="", calls=(), reasoning=""):
    made = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": made} if made else {})}


def read(found):
    """The same with arguments as values."""
    calls = found.get("tool_calls", [])
    values = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
    return {**found, **({"tool_calls": [{**call, "function": each} for call, each in zip(calls, values)]} if calls else
                        {})}


@pytest.mark.parametrize("form", FORMS)
def test_random_answers(form):
    source = random.Random(form)
    for number in range(60):
        content = text_of(source, 8).strip() if number % 3 else ""
        content = f"Well{content}." if content else ""  # begins with nothing that may be a call
        reasoning = f"I{text_of(source, 8)}.".strip() if number % 2 else ""
        calls = [(source.choice(list(TOOLS)), arguments_of(source)) for _ in range(source.randrange(4))]
        calls = [(name, values if TOOLS[name] else {}) for name, values in calls]
        found = every_way(form, written(form, content, calls, reasoning), source)
        assert read(found) == message(content, calls, reasoning)


@pytest.mark.parametrize("form", FORMS)
def test_a_recorded_answer_cut_at_every_character(form):
    calls = [("get_weather", {"city": "Paris", "days": 2}), ("now", {})]
    text = written(form, "Let me look.", calls, "The user asks for the weather.")
    assert read(every_way(form, text)) == message("Let me look.", calls, "The user asks for the weather.")


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_answer_is_told_whole(form):
    """Without a call it stays as it is; each call that is left is JSON, and cuts change nothing."""
    source = random.Random(f"damaged {form}")
    for _ in range(150):
        calls = [("get_weather", arguments_of(source)) for _ in range(source.randrange(1, 3))]
        text = written(form, source.choice(["", "Hm."]), calls)
        for _ in range(source.randrange(1, 4)):
            at = source.randrange(len(text) + 1)
            text = text[:at] + source.choice(["", *BITS]) + text[at + source.randrange(3):]
        found = every_way(form, text, source)
        for call in found.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        if "tool_calls" not in found and form != "harmony":
            assert found["content"] == text


TAGS = "<tool_call>\n{}\n</tool_call>"
MALFORMED = {
    "hermes": [TAGS.format(inner) for inner in (
        "", "{", '{"name": "f"}', '{"arguments": {}}', '{"name": 5, "arguments": {}}', '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": [1]}', '{"name": "", "arguments": {}}', '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": tru}}',
        '{"name": "f", "arguments": {"a"}}',
        '{"name": "f", "arguments": {a: 1}}', "{'name': 'f', 'arguments': {}}", '{"name": "f", "arguments": {}} x',
        '{"name": "f", "name": "g", "arguments": {}}', '{"name": "f", "arguments": {"a": 1, "a": 2}, "arguments": {}}',
        '{"name": "f", "arguments": {}, "parameters": {}}', '{"name": "f", "arguments": "no"}',
        '{"name": "f", "arguments": {"a": "\t"}}', '{"name": "f", "arguments": {"a": "\\x"}}',
        '{"name": "f", "arguments": {"a": ' + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}}",
        '{"name": "' + "f" * 300 + '", "arguments": {}}')] + [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}', "<tool_call", '{"name": "now", "arguments": {}}'],
    "qwen-xml": [TAGS.format(inner) for inner in (
        "<function=>\n</function>", "<function=f>", "<function=f>\n<parameter=a>\n1\n</function>",
        "x<function=f></function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>")],
    "glm": ["<tool_call>\n</tool_call>", '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            "<tool_call>f\n<arg_key>a",
            "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "<tool_call>f\n<arg_value>a</arg_value>\n</tool_call>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": "f", "arguments": {}}',
                "[TOOL_CALLS] no, not this one",
                '[TOOL_CALLS][{"name": "f", "arguments": {}}; {}]', '[{"name": "f", "arguments": {}}]'],
    "mistral-args": ["[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]f[ARGS]5"],
    "llama": ['{"name": "other", "parameters": {}}', '{"name": "now", "parameters": {}} and text', '{"a": 1}', "{",
              "<|python_tag|>print(1)", 'So: {"name": "now", "parameters": {}}', '{"name": "now"}'],
    "deepseek": [BEGIN, BEGIN + END, f"{BEGIN}{ONE}function{SEP}f\n```json\n{{}}{OVER}{END}",
                 f"{ONE}tool{SEP}f\n```json\n{{}}\n```",
                 f"{BEGIN}{ONE}function{SEP}f\n```\n{{}}\n```{OVER}{END}", f"{BEGIN}{ONE}f{OVER}{END}"],
    "deepseek-v3.1": [f"{BEGIN}{ONE}f{SEP}{{{OVER}{END}", f"{BEGIN}{ONE}{SEP}{{}}{OVER}{END}", f"{ONE}f{SEP}5{OVER}",
                      f"a{END}"]}


@pytest.mark.parametrize("form, text", [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_stays_text(form, text):
    for before, after in (("", ""), ("Well.\n\n", " \n"), ("", "\nNo.")):
        assert every_way(form, before + text + after) == message(before + text + after)


@pytest.mark.parametrize("form", [form for form in WRITERS if form != "llama"])
def test_a_good_call_beside_a_malformed_one(form):
    bad, good = MALFORMED[form][1], written(form, "", [("now", {})])
    assert read(every_way(form, f"{good}\n{bad}")) == message(f"\n{bad}", [("now", {})])


@pytest.mark.parametrize("text, expected", [
    (f"{CHANNEL}final{MESSAGE}Hello", message("Hello")), ("Hello", message("Hello")), ("", message()),
    (f"{CHANNEL}analysis{MESSAGE}Hm", message(reasoning="Hm")), (f"{CHANNEL}anal", message(f"{CHANNEL}anal")),
    ((f"{CHANNEL}analysis{MESSAGE}A<|end|><|start|>assistant{CHANNEL}analysis{MESSAGE}B<|end|><|start|>assistant"
      f"{CHANNEL}final{MESSAGE} C \n<|return|>"), message(" C \n", reasoning="A\nB")),
    (f"<|start|>assistant to=functions.now{CHANNEL}commentary json{MESSAGE}{{}}", message(calls=[("now", {})])),
    (f" to=functions.now{CHANNEL}commentary <|constrain|>json{MESSAGE} {{}} <|call|>", message(calls=[("now", {})])),
    (f"{CHANNEL}{CALLED}now{MESSAGE}{{}}<|call|><|start|>assistant{CHANNEL}{CALLED}now{MESSAGE}{{}}<|call|>",
     message(calls=[("now", {}), ("now", {})])),
    (f"{CHANNEL}{CALLED}now json{MESSAGE}{{x}}<|call|>", message(f"{CHANNEL}{CALLED}now json{MESSAGE}{{x}}")),
    (f"{CHANNEL}{CALLED}now json{MESSAGE}{{}} and", message(f"{CHANNEL}{CALLED}now json{MESSAGE}{{}} and")),
    (f"{CHANNEL}what is this?{MESSAGE}a<|end|>b", message(f"{CHANNEL}what is this?{MESSAGE}a\nb")),
    (f"<|start|>user{MESSAGE}a<|start|>", message(f"<|start|>user{MESSAGE}a\n<|start|>")),
    ("<|end|><|end|>x", message("x"))])
def test_harmony(text, expected):
    assert read(every_way("harmony", text)) == expected


def test_harmony_without_tools():
    text = f"{CHANNEL}{CALLED}now json{MESSAGE}{{}}"
    assert every_way("harmony", text, tools={}) == message(text)


@pytest.mark.parametrize("text, is_begun, expected", [
    ("<think>\nA\n</think>\n\nB", False, message("B", reasoning="A")),
    ("\nA\n</think>\n\nB", True, message("B", reasoning="A")),
    ("\n<think>A</think>B", False, message("B", reasoning="A")), ("A</think>B", False, message("A</think>B")),
    ("A <think>B</think>", False, message("A <think>B</think>")), ("<thin", False, message("<thin")),
    ("<think>A ", False, message(reasoning="A")), ("A\n\nB ", True, message(reasoning="A\n\nB")), ("", True, message()),
    ("</think> B\n ", True, message("B\n ")), ("<think></think>", False, message()), (" \n", False, message(" \n")),
    ("A<tool_call></think>B", True, message("B", reasoning="A<tool_call>")), (" a ", False, message(" a "))])
def test_thoughts(text, is_begun, expected):
    for form, tools in (("hermes", TOOLS), (None, {})):
        assert every_way(form, text, is_begun=is_begun, tools=tools) == expected


def test_what_is_hidden_is_not_told():
    """Special tokens are marks where they are some, and no text; those of which nothing comes are left out of it."""
    pieces = [("Well", 0), ("<|x|>", 1), (".", 0), ("[TOOL_CALLS]", 1), ("now", 0), ("[ARGS]", 1), ("{}", 0),
              ("[TOOL_CALLS]", 1),
              ("no", 0), ("[ARGS]", 1), ("y", 0), ("<|x|>", 1)]
    text, hidden = "", []
    for piece, is_hidden in pieces:
        hidden += [(len(text), len(text) + len(piece))] * is_hidden
        text += piece
    assert every_way("mistral", text, hidden=hidden) == message("Well.noy", [("now", "{}")])
    assert every_way("mistral", text) == message("Well<|x|>.[TOOL_CALLS]no[ARGS]y<|x|>", [("now", "{}")])


def test_as_many_calls_as_are_asked_for():
    for form in FORMS:
        calls = [("now", {}), ("now", {})]
        text = written(form, "", calls)
        found = every_way(form, text, most=1)
        if form in ("mistral", "llama"):  # two in one
            assert found == message(text)
        else:
            assert read(found)["tool_calls"] == message("", calls[:1])["tool_calls"] and "now" in found["content"]


def test_arguments_are_as_the_model_wrote_them():
    written_so = '{ "a":1.10,\n"b" : "\\u00e9", "c":1e400,"d":12345678901234567890123}'
    for text in (f'<tool_call>{{"arguments":{written_so} , "name" : "now"}}</tool_call>',
                 f'<tool_call>{{"name": "now", "arguments": {json.dumps(written_so)}}}'):
        assert every_way("hermes", text) == message("", [("now", written_so)])
    long = json.dumps({"a": "x" * 3 * PIECE})
    parts, deltas = told("mistral", f"[TOOL_CALLS]now[ARGS]{long}", [])
    assert len(deltas) == 1 + -(-len(long) // PIECE) and assembled(deltas) == message("", [("now", long)])
    assert len(parts.calls[0]["id"]) == 9 and parts.calls[0]["id"].isalnum()


REF = {"$defs": {"n": {"anyOf": [NUMBER, {"$ref": "#/$defs/n"}]}, "a/b": {"enum": ["x", 1]}},
       "properties": {"r": {"$ref": "#/$defs/n"}, "s": {"$ref": "#/$defs/a~1b"}, "t": {"$ref": "#/no"},
                      "u": {"type": ["string", "null"]},
                      "v": {"anyOf": [{}, NUMBER]}, "w": {"const": True}, "n": {"type": "number"}}}


@pytest.mark.parametrize("name, text, value", [
    ("r", "5", 5), ("r", "five", "five"), ("r", "5.0", 5.0), ("r", "5.5", "5.5"), ("s", "1", 1), ("s", "x", "x"),
    ("t", "[1]", [1]), ("t", "abc", "abc"), ("u", "None", None), ("u", "null", None), ("u", "5", "5"), ("v", "5", 5),
    ("w", "True", True), ("w", "true", True), ("other", "True", "True"), ("other", "{", "{"), ("n", "2", 2),
    ("n", "NaN", "NaN"), ("n", " 1.5 ", 1.5), ("n", "1" * 5000, "1" * 5000)])
def test_an_argument_has_its_schemas_type(name, text, value):
    assert json.loads(as_json({name: text}, REF)) == {name: value}
    assert json.loads(as_json({name: text}, {"properties": 5})) is not None and json.loads(as_json({}, None)) == {}


def test_schemas_that_refer_to_each_other_take_no_time():
    defs = {f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(200)}
    schema = {"$defs": {**defs, "d200": NUMBER}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    assert as_json({"a": "5"}, schema) == '{"a": 5}'


TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>final<|message|>", "glm": "<tool_call>{{ n }}<arg_key>",
    "hermes": "<tool_call>\n{",
    "qwen-xml": "<tool_call>\n<function=f>\n<parameter=a>", "mistral": "[TOOL_CALLS][",
    "mistral-args": "[TOOL_CALLS]f[ARGS]",
    "llama": '{"name": function name, "parameters": dictionary', "deepseek": f"{ONE}function{SEP}n\n```json\n",
    "deepseek-v3.1": f"{ONE}n{SEP}a"}


def test_the_format_that_a_template_speaks_of():
    assert {form: format_of(text) for form, text in TEMPLATES.items()} == {form: form for form in FORMATS}
    assert format_of("{{ messages }}{{ tools }}<function=f>") is None and format_of("<|python_tag|>") == "llama"
    found = {path.stem: format_of(path.read_text()) for path in (DATA / "chat_templates").glob("*.jinja")}
    assert found["09_channels"] == "harmony" and found["07_plain"] is None


class Chat:
    """One that renders what it is told to."""

    def __init__(self, text):
        self._text = text

    def render(self, line, most, where):
        return self._text


@pytest.mark.parametrize("template, prompt, start, answer, expected", [
    ("<think></think>", "assistant\n<think>\n", None, "A</think>B", message("B", reasoning="A")),
    ("<think></think>", "assistant\n<think>\n\n</think>\n\n", None, "A</think>B", message("A</think>B")),
    ("<think></think>", "assistant", None, "<think>A</think>B", message("B", reasoning="A")),
    ("</think>", "assistant\n</think>", None, "B", message("B")),
    ("[THINK]", "x[THINK]", None, "A[/THINK]B", message("B", reasoning="A")),
    ("-", "<think>", None, "A</think>B", None),
    ("<think>", "<think>A", "<think>A", "C</think>B", message("B", reasoning="C")),
    ("<think>", "<think>A</think>B", "<think>A</think>B", "C", message("C")),
    ("<think>", "<think>A", [{"type": "text", "text": "<think>A"}], "C</think>B", message("B", reasoning="C"))])
def test_what_the_prompt_has_begun(template, prompt, start, answer, expected):
    messages = [{"role": "user", "content": "x<think>"}]
    messages += [{"role": "assistant", "content": start}] * (start is not None)
    conversation = Conversation(Chat(prompt), messages, continue_final_message=start is not None)
    conversation.text()
    reading = Reading({"default": template})
    assert reading.has_parts(conversation) == (expected is not None)
    parts = reading.parts(conversation)
    parts.rest(answer)
    assert parts.message() == (expected or message(answer))


def test_the_template_of_tools_and_a_format_that_is_named():
    with_tools = Conversation(None, [], [{"type": "function", "function": {"name": "now"}}])
    without = Conversation(None, [])
    reading = Reading({"default": "{{ x }}", "tool_use": "<tool_call>"})
    assert (reading.form(), reading.has_parts(with_tools), reading.has_parts(without)) == ("hermes", True, False)
    reading = Reading({"default": "<tool_call>"}, "mistral")
    assert reading.form() == "mistral" and reading.parts(with_tools).rest("[TOOL_CALLS]now[ARGS]{}")[0]["tool_calls"]
    assert not Reading({"default": "-"}).has_parts(with_tools)
    assert Reading({"default": "-"}, "harmony").has_parts(without)


def test_tools_that_are_too_long():
    tool = {"type": "function", "function": {"name": "f", "description": "x" * tools_module.MAX_BYTES}}
    with pytest.raises(Refused, match="^tools: 262212 bytes of JSON, expected at most 262144; send "):
        tools_module.tools_of({"tools": [tool]})
