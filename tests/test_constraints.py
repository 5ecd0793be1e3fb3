"""What a request may ask for of its answer's form, tool calls included, and how it is refused."""

import json
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest
from asking import PROMPT, ask, complete

from colibri.call_grammars import FORMS
from colibri.constraints import constraint_of
from colibri.errors import ColibriError
from colibri.grammars import Grammars
from colibri.refused import Refused
from colibri.schemas import MAX_BYTES
from colibri.text import Bytes

FORMAT = "response_format"
SCHEMA = f"{FORMAT}.json_schema.schema"
EXAMPLE = '{"name": "answer", "schema": {...}}'
LARK = 'expected a Lark grammar, or an object such as {"syntax": "regex", "definition": "[a-z]+"}'
CHOICE = 'expected none, auto, required, or {"type": "function", "function": {"name": ...}}'
DEEP = "49 objects and lists within each other, expected at most 48; give names to parts of it in $defs"


def schema(value, **fields):
    return {FORMAT: {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **fields}}}


def nested(depth):
    value = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "array", "maxItems": 1, "items": value}
    return value


@pytest.mark.parametrize("values", [{}, {FORMAT: None}, {FORMAT: {"type": "text"}}, {"grammar": None},
                                    {FORMAT: {"type": "text", "json_schema": None}},
                                    {"tools": [{"type": "function", "function": {"name": "f"}}]},
                                    {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}])
def test_what_asks_for_nothing(values):
    assert constraint_of(values) is None


@pytest.mark.parametrize("values, message", [
    ({FORMAT: 5}, f'{FORMAT}: 5, expected an object such as {{"type": "json_object"}}'),
    ({FORMAT: {}}, f"{FORMAT}.type: missing, expected one of text, json_object, json_schema"),
    ({FORMAT: {"type": "xml"}}, f'{FORMAT}.type: "xml", expected one of text, json_object, json_schema'),
    ({FORMAT: {"type": "json_object", "schema": {}}}, f'{FORMAT}: "schema": unknown field, expected one of type'),
    ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema: missing, expected an object such as {EXAMPLE}"),
    ({FORMAT: {"type": "json_schema", "json_schema": []}},
     f"{FORMAT}.json_schema: a list, expected an object such as {EXAMPLE}"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"name": "x"}}},
     f"{SCHEMA}: missing, expected a JSON schema, an object"),
    (schema(True), f"{SCHEMA}: true, expected a JSON schema, an object"),
    (schema({}, strict=1), f"{FORMAT}.json_schema.strict: 1, expected true or false"),
    (schema({}, name=1), f"{FORMAT}.json_schema.name: 1, expected a string"),
    (schema({"x-guidance": {}}), f"{SCHEMA}: x-guidance, expected keywords of JSON Schema; leave it out"),
    (schema(nested(48)), f"{SCHEMA}: {DEEP}"),
    (schema({"description": "x" * MAX_BYTES}), f"{SCHEMA}: 65555 bytes, expected at most 65536; make it simpler"),
    ({"grammar": 5}, f"grammar: 5, {LARK}"), ({"grammar": " "}, f"grammar: empty, {LARK}"),
    ({"grammar": {"syntax": "gbnf", "definition": "x"}}, 'grammar.syntax: "gbnf", expected one of lark, regex'),
    ({"grammar": {"definition": "x"}}, "grammar.syntax: missing, expected one of lark, regex"),
    ({"grammar": {"syntax": "lark"}}, "grammar.definition: missing, expected a string"),
    ({"grammar": {"syntax": "lark", "definition": 1}}, "grammar.definition: 1, expected a string"),
    ({"grammar": "x" * (MAX_BYTES + 1)}, "grammar: 65537 bytes, expected at most 65536; make it simpler"),
    ({"grammar": "start: /a/", FORMAT: {"type": "json_object"}},
     f"grammar: given with {FORMAT}, expected one of them; leave one out"),
    ({"tool_choice": "required"}, 'tool_choice: "required", expected tools; give some'),
    ({"tool_choice": "any"}, f'tool_choice: "any", {CHOICE}'),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}},
      "tools": [{"type": "function", "function": {"name": "f"}}]},
     'tool_choice.function.name: "g", expected the name of one of tools'),
    ({"tools": [{"function": {"name": "f", "parameters": 5}}]},
     "tools[0].function.parameters: 5, expected a JSON schema, an object"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
     "tool_choice: calls in a form of the model's own (None), expected one of " + ", ".join(FORMS)
     + '; set "tool_choice" to "auto", without "strict"')])
def test_what_is_refused(values, message):
    with pytest.raises(Refused) as error:
        constraint_of(values)
    assert str(error.value) == message and error.value.code == "bad_request"


def test_labels_are_the_clients_names():
    with pytest.raises(Refused, match="^x: 5, expected"):
        constraint_of({"grammar": 5}, {"grammar": "x"})


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("llguidance")
    made = Grammars(Bytes(), 256, ())
    yield made
    made.close()


def end_of(grammar, text):
    """complete, open or wrong: how a grammar sees a text."""
    guide = grammar.guide(())
    for byte in text.encode():
        if guide.is_complete or not guide.allowed()[byte // 32] >> np.uint32(byte % 32) & 1:
            return "wrong"
        guide.add(byte)
    guide.allowed()
    assert guide.error is None
    return "complete" if guide.is_complete else "open"


def test_json_has_blanks_as_models_write_them_and_no_more(grammars):
    grammar = grammars.compile(constraint_of(schema({
        "type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]})))
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}', '{\n\t"a": []}'):
        assert end_of(grammar, text) == "complete"
    for text in (" {", '{  "a"', '{\n\n"a"', '{"a": [1]} ', '{"a": [' + 40 * "\n "):
        assert end_of(grammar, text) == "wrong"


def test_patterns_are_those_of_javascript(grammars):
    grammar = grammars.compile(constraint_of(schema({"type": "string", "pattern": r"^\d[\w-]\s?$"})))
    for text in ('"1a"', '"1_ "', '"9-"'):
        assert end_of(grammar, text) == "complete"
    for text in ('"٣a"', '"1é"', '"1\u2003"', '"12\u00a0"'):
        assert end_of(grammar, text) == "wrong"
    grammar = grammars.compile(constraint_of(schema({"const": {"pattern": r"\d"}})))
    assert end_of(grammar, r'{"pattern":"\\d"}') == "complete"


def test_the_deepest_schema_compiles(grammars):
    grammar = grammars.compile(constraint_of(schema(nested(47))))
    assert end_of(grammar, 47 * "[" + "5" + 47 * "]") == "complete"


@pytest.mark.parametrize("value, words", [
    ({"not": {"type": "integer"}}, 'Unimplemented keys: ["not"]'), ({"type": "foo"}, "Invalid type: foo"),
    ({"$ref": "http://example.com/x"}, "Resource 'http://example.com/x' is not present"),
    ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"), ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "format": "foo"}, "Unknown format: foo"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength (5) is greater than maxLength (3)"),
    ({"anyOf": [{"pattern": "x"}, {"const": "\ud800"}]}, "")])
def test_schemas_that_are_not_taken(grammars, value, words):
    with pytest.raises(ColibriError) as error:
        grammars.compile(constraint_of(schema(value)))
    assert str(error.value).startswith(f'{FORMAT}: "') and words in str(error.value)
    assert "\n" not in str(error.value) and str(error.value).endswith('", expected what llguidance takes')


# Tool calls

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/n"},
                                               "unit": {"type": "string", "enum": ["c", "f"]}},
              "required": ["city"], "additionalProperties": False, "$defs": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}},
         {"type": "function", "function": {"name": "now"}}]
BEGIN, END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CALLS = {  # a call of each form, with %s for the name of an argument
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "R", "%s": 2}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "R", "%s": 2}}]',
    "mistral-args": '[TOOL_CALLS]weather[ARGS]{"city": "R", "%s": 2}',
    "llama": '{"name": "weather", "parameters": {"city": "R", "%s": 2}}',
    "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nR\n</parameter>\n<parameter=%s>\n2\n"
                "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>R</arg_value>\n<arg_key>%s</arg_key>\n"
           "<arg_value>2</arg_value>\n</tool_call>",
    "deepseek": BEGIN + 'function<｜tool▁sep｜>weather\n```json\n{"city": "R", "%s": 2}\n```' + END,
    "deepseek-v3.1": BEGIN + 'weather<｜tool▁sep｜>{"city": "R", "%s": 2}' + END,
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
               '<|constrain|>json<|message|>{"city": "R", "%s": 2}'}
REPEATED = ("hermes", "mistral-args", "qwen-xml", "glm")  # forms in which a call may simply follow another


@pytest.mark.parametrize("form", FORMS)
def test_calls_follow_their_tools(grammars, form):
    good, bad, between = CALLS[form] % "days", CALLS[form] % "dayz", "".join(FORMS[form].between)
    named = {"type": "function", "function": {"name": "weather"}}
    text = "<|channel|>final<|message|>Hello" if form == "harmony" else "Hello <b>"
    answer = "<|channel|>final<|message|>" * (form == "harmony") + '{"x": 1}'

    def seen(*texts, **fields):
        grammar = grammars.compile(constraint_of({"tools": TOOLS, **fields}, tool_format=form))
        return [end_of(grammar, each) for each in texts]
    more = "open" if form in REPEATED else "complete"
    two = good + between + good
    assert seen(good, bad, text, answer, tool_choice="required") == [more, "wrong", "wrong", "wrong"]
    assert seen(good, bad, two, tool_choice=named) == ["complete", "wrong", "wrong"]
    assert seen(two, tool_choice="required", parallel_tool_calls=False) == ["wrong"]
    if form in REPEATED:
        assert seen(two, two.replace("weather", "later"), tool_choice="required") == ["open", "wrong"]
    free = "complete" if FORMS[form].is_single else "open"
    assert seen(good, bad, text) == [free, "wrong", "open"]
    assert seen(good, answer, text, response_format={"type": "json_object"}) == [more, "complete", "wrong"]
    assert constraint_of({"tools": TOOLS, "tool_choice": "none"}, tool_format=form) is None


def test_what_a_model_thinks_before_its_answer(grammars):
    for is_begun, begin in ((False, "<think>"), (True, "")):
        grammar = grammars.compile(constraint_of({FORMAT: {"type": "json_object"}},
                                                 thought=("<think>", "</think>", is_begun)))
        assert end_of(grammar, begin + 'So {"a <b\n</think>\n\n{"x": 1}') == "complete"
        assert end_of(grammar, begin + "So</think>no") == "wrong"
        assert end_of(grammar, '{"x": 1}') == ("open" if is_begun else "complete")


# A server

def test_a_server_answers_in_the_form_that_is_asked_for(service):
    pytest.importorskip("llguidance")
    value = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, 2]}},
             "required": ["a", "b"], "additionalProperties": False}
    body = {"model": "moe-32.bin", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "n": 3,
            "temperature": 1, "seed": 4, **schema(value)}
    status, _, text = ask(service, "POST", "/v1/chat/completions", body)
    found = [choice["message"]["content"] for choice in json.loads(text)["choices"]]
    assert status == 200 and len(set(found)) == 3
    for each in map(json.loads, found):
        assert set(each) == {"a", "b"} and len(each["a"]) <= 9 and each["b"] in (1, 2)
    status, got = complete(service, prompt=PROMPT, grammar='start: "captain" | "ship"', max_tokens=40)
    assert status == 200 and got["choices"][0]["text"] in ("captain", "ship")
    assert got["choices"][0]["finish_reason"] == "stop"
    with service.client() as client:
        line = client.ask(prompt=PROMPT, grammar={"syntax": "regex", "definition": "[0-9]{3}"}, logprobs=1)
        assert line["text"].isdigit() and len(line["text"]) == 3 == len(line["logprobs"])


def test_openais_parse(service):
    """Its schema of a class, with what pydantic makes of unions and nested classes."""
    pytest.importorskip("llguidance")

    class Place(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        kind: Literal["ship", "port"]

    class Found(pydantic.BaseModel):
        places: list[Place] = pydantic.Field(max_length=2)
        count: int | None = pydantic.Field(le=99)
        best: Place | None
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none")
    for seed in range(5):
        answer = client.chat.completions.parse(model="moe-32.bin", messages=[{"role": "user", "content": "Which?"}],
                                               response_format=Found, temperature=1.0, seed=seed, max_tokens=450)
        assert isinstance(answer.choices[0].message.parsed, Found)


def test_a_grammar_that_takes_long_holds_nobody_up(service):
    pytest.importorskip("llguidance")
    slow = {"type": "integer", "multipleOf": 1000003}
    with service.client() as first, service.client() as second:
        first.send({"id": 1, "prompt": PROMPT, **schema(slow)})
        assert second.ask(prompt=PROMPT, max_new_tokens=2)["finish_reason"] == "length"
        assert second.ask(prompt=PROMPT, grammar='start: "yes"')["text"] == "yes"
        first.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.socket.recv(1)
        first.socket.settimeout(30)
        assert "compiling it: more than 1 s of computing" in first.receive()["error"]["message"]


@pytest.mark.parametrize("fields, param", [
    (schema({"not": {}}), FORMAT), (schema(5), SCHEMA), ({FORMAT: {"type": "x"}}, f"{FORMAT}.type"),
    ({"grammar": "start: foo"}, "grammar"), ({"grammar": {"syntax": "lark"}}, "grammar.definition")])
def test_a_server_says_which_field_is_wrong(service, fields, param):
    pytest.importorskip("llguidance")
    status, got = complete(service, prompt=PROMPT, **fields)
    assert (status, got["error"]["param"], got["error"]["code"]) == (400, param, "bad_request")
    assert got["error"]["message"].startswith(param)
