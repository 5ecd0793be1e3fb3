"""Chat templates of published kinds, rendered byte for byte as transformers does; and those that raise or never end.

data/chat_templates has twenty templates, and in cases.json conversations with the text, or the error, that the
apply_chat_template of that version of transformers made of each by each: its clock stood at FIXED.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import DATA, ROOT

from colibri import chat, template
from colibri.chat import Chat, Conversation, NotRendered
from colibri.errors import ColibriError
from colibri.settings import Settings

FOLDER = DATA / "chat_templates"
RECORDED = json.loads((FOLDER / "cases.json").read_text())
TOKENS, CONVERSATIONS = RECORDED["special_tokens"], RECORDED["conversations"]
NAMES = sorted(RECORDED["rendered"])
FIXED = datetime.datetime(2025, 3, 7, 9, 5, 1)
USER = [{"role": "user", "content": "hi"}]
OWN = ("tools", "documents", "add_generation_prompt", "continue_final_message")


def text_of(name):
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture
def chat_of():
    """A function: the Chat of a template, or of named ones."""
    made = []

    def make(templates, tokens=TOKENS):
        named = templates if isinstance(templates, dict) else {"default": templates}
        made.append(Chat(Settings(named, tokens, {}), "model.bin"))
        return made[-1]
    yield make
    for each in made:
        each.close()


def asked(chat, messages, add_generation_prompt=False, **options):
    """The text of a conversation; options as apply_chat_template takes them."""
    own = {name: options.pop(name) for name in OWN if name in options}
    return Conversation(chat, messages, add_generation_prompt=add_generation_prompt, values=options, **own).text()


@pytest.mark.parametrize("name", NAMES)
def test_as_transformers_renders(name, chat_of):
    """Today's date, of the three that have it, is that of the process."""
    made, today = chat_of(text_of(name)), datetime.datetime.now()
    for case, expected in RECORDED["rendered"][name].items():
        if "text" in expected:
            text = expected["text"]
            for form in ("%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%d %B %Y"):
                text = text.replace(FIXED.strftime(form), today.strftime(form))
            assert asked(made, **CONVERSATIONS[case]) == text, case
        else:
            with pytest.raises(NotRendered) as error:
                asked(made, **CONVERSATIONS[case])
            words = " ".join(expected.get("error", "").split())[:300]
            assert error.value.code == "bad_request" and words in str(error.value), case


def test_what_was_recorded_is_of_all_kinds():
    """Each template renders most conversations, and each conversation is rendered by some: nothing here is empty."""
    texts = [text_of(name) for name in NAMES]
    for construct in ("namespace(", "strftime_now", "raise_exception", "macro", "generation", "break", "continue",
                      "tojson(indent",
                      "[::-1]", ".split(", ".startswith(", "is defined", " ~ ", "endset", "| trim", "items()",
                      "recursive", "call("):
        assert any(construct in text for text in texts), construct
    rendered = RECORDED["rendered"]
    assert len(NAMES) == 20 and all(sum("text" in each for each in rendered[name].values()) >= 13 for name in NAMES)
    assert {case for name in NAMES for case, each in rendered[name].items() if each.get("text")} == (
        CONVERSATIONS.keys() - {"goes on with nothing"})


def test_the_named_template(chat_of):
    made = chat_of({"default": "D{{ tools is none }}", "tool_use": "T{{ tools | length }}", "rag": "R"})
    assert (asked(made, USER), asked(made, USER, tools=[{}]), asked(made, USER, tools=[])) == ("DTrue", "T1", "T0")
    assert asked(chat_of({"default": "D{{ tools | length }}", "rag": "R"}), USER, tools=[{}]) == "D1"
    with pytest.raises(NotRendered) as error:
        asked(chat_of({"tool_use": "T", "rag": "R"}), USER)
    assert str(error.value) == ("model.bin: chat templates rag, tool_use, expected one called default; convert a "
                                "folder that has it")


@pytest.mark.parametrize("text, words", [
    ("{{ raise_exception('no\n\nway: \"' ~ messages[0].content ~ '\"') }}", 'no way: "hi"'),
    ("{{ messages[0].x.y }}", "'dict object' has no attribute 'x'"),
    ("{{ messages[0].content + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
    ("a\n{% for", "line 2: unexpected 'end of template'"),
    ("{{ x | nofilter }}", "line 1: No filter named 'nofilter'."),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion depth exceeded"),
    ("{% for i in range(100001) %}{% endfor %}",
     "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."),
    ("{{ 'x' * 10 ** 12 }}", "MemoryError"),
    ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "MemoryError"),
    ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
    ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
    ("{{ namespace(_x=1) }}", "a namespace's '_x', expected no underscore before a name")])
def test_templates_that_raise(chat_of, text, words):
    """In one line, and the next conversation is rendered."""
    message = f'messages: chat template: "{words}", expected messages that it takes'
    if words.startswith("line "):
        message = f'model.bin: chat template default: "{words}", expected Jinja; correct it, and convert again'
    made = chat_of({"default": text, "tool_use": "fine"})
    for _ in range(2):
        with pytest.raises(NotRendered) as error:
            asked(made, USER)
        assert str(error.value) == message and error.value.code == "bad_request"
        assert asked(made, USER, tools=[]) == "fine"


def test_a_template_that_never_ends(chat_of, monkeypatch):
    """Its process ends; another renders what comes next."""
    monkeypatch.setattr(chat, "CPU_SECONDS", 0.2)
    loop = "{% for i in range(100000) %}{% for i in range(100000) %}{% endfor %}{% endfor %}"
    made = chat_of({"default": loop, "tool_use": "fine"})
    with pytest.raises(NotRendered) as error:
        asked(made, USER)
    assert str(error.value) == (
        "messages: chat template: more than 0.2 s of computing, expected a prompt before that; send less")
    assert asked(made, USER, tools=[]) == "fine"
    first, = made._idle
    first.kill()
    first.wait()
    with pytest.raises(NotRendered, match="its process ended with SIGKILL"):
        asked(made, USER, tools=[])
    assert asked(made, USER, tools=[]) == "fine"


def test_text_without_end(chat_of):
    made = chat_of("{% for i in range(100000) %}{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}")
    for most in (0, 5, 10_000):
        with pytest.raises(NotRendered) as error:
            Conversation(made, USER).text(most, "--chat")
        assert (error.value.code, str(error.value)) == (
            "too_long", f"--chat: more than {most} characters by the chat template, expected fewer")
    made = chat_of("{{ 'x' * 10 }}{{ messages[0].content }}")
    assert Conversation(made, USER).text(12) == "xxxxxxxxxxhi"
    with pytest.raises(NotRendered):
        Conversation(made, USER).text(11)


def test_odd_messages(chat_of):
    made = chat_of("{{ messages[0].content }}|{{ bos_token }}|{{ sep }}")
    for content in ("\ud83d", "\0\n\r\u2028", "{{ 1 }}{% raw %}", "", "é" * 100_000):
        assert asked(made, [{"role": "user", "content": content}]) == f"{content}|<s>|"
    assert asked(made, USER, bos_token="<b>", sep="-") == "hi|<b>|-"  # a request's values go before the model's tokens
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ColibriError, match="^messages: nested too deeply, expected plain fields$"):
        asked(made, [{"role": "user", "content": "x", "more": deep}])


CONTENT, CALLS = "{{ messages[0].content }}", "{{ messages[1].tool_calls[0].function.arguments"
LISTS = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"


@pytest.mark.parametrize("text, content, expected", [
    (CONTENT, "a", "a"), (CONTENT, ["a", "b"], "ab"),
    (f"{{% if messages[0].content is string %}}{CONTENT}{{% else %}}{LISTS}{{% endif %}}",
                                                      ["a", "b"], "[a][b]"),
    (LISTS, "a", "[a]"), (LISTS, ["a", "b"], "[a][b]"), ("{{ messages[0].content + '!' }}", ["a", "b"], "ab!"),
    ("{{ messages[0].content | tojson }}", ["a"], '"a"'), ("-", ["a"], "-"),
    ("{{ raise_exception('x') if not tools }}-", ["a"], "-")])
def test_content_in_the_form_that_a_template_takes(chat_of, text, content, expected):
    if isinstance(content, list):
        content = [{"type": "text", "text": part} for part in content]
    made = chat_of(text)
    assert Conversation(made, [{"role": "user", "content": content}], [{}], adapts=True).text() == expected


@pytest.mark.parametrize("text, arguments, expected", [
    (CALLS + " | tojson }}", '{"b":1,"a":"é"}', '{"b": 1, "a": "é"}'), (CALLS + " | tojson }}", "", "{}"),
    (CALLS + " | tojson }}", "{not", '"{not"'), (CALLS + " }}", '{"b":1}', '{"b":1}'),
    (CALLS + " + '!' }}", '{"b":1}', '{"b":1}!'), (CALLS + ".items() | list | length }}", '{"b":1}', "1"),
    (CALLS + ".items() | list }}", '{"b":1}', "[('b', 1)]"),
    (CALLS + " | tojson }}", {"b": 1}, '{"b": 1}'), (CALLS + " | tojson }}", "[1]", '"[1]"'),
    ("{% for k, v in " + CALLS.removeprefix("{{ ") + " | items %}<{{ k }}>{{ v }}{% endfor %}", '{"b":1}', "<b>1")])
def test_arguments_in_the_form_that_a_template_takes(chat_of, text, arguments, expected):
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert Conversation(chat_of(text), messages, adapts=True).text() == expected


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_results_as_clients_send_them(name, chat_of):
    """Without content, or with null, and with arguments as text: as transformers renders "" and an object."""
    made = chat_of(text_of(name))

    def rendered(arguments, **content):
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*USER, {"role": "assistant", **content, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "5"}]
        try:
            return Conversation(made, messages, adapts=True).text()
        except NotRendered as error:
            return error.parts
    expected = rendered({"a": 1}, content="")
    assert rendered('{"a": 1}') == rendered('{"a": 1}', content=None) == rendered('{"a":1}', content="") == expected
    assert isinstance(expected, str) or name == "05_turns"


def test_signals_of_the_terminal_do_not_end_the_process(chat_of):
    made = chat_of("fine")
    assert asked(made, USER) == "fine"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(made._idle[0].pid, number)
    assert asked(made, USER) == "fine" and len(made._idle) == 1


def test_the_process_ends_with_its_parent(tmp_path):
    script = (f"import sys; sys.path[:0] = [{str(ROOT)!r}]\nfrom colibri.chat import Chat, Conversation\n"
              "from colibri.settings import Settings\nimport os\n"
              "chat = Chat(Settings({'default': 'fine'}, {}, {}), 'm')\nprint(Conversation(chat, []).text(), "
              "chat._idle[0].pid, flush=True)\nos._exit(0)")
    text, number = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                                  cwd=tmp_path).stdout.split()
    for _ in range(500):
        try:
            with open(f"/proc/{number}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("it runs")
    assert text == "fine"


def test_without_jinja2(monkeypatch):
    monkeypatch.setattr(chat.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ColibriError) as error:
        Chat(Settings({"default": ""}, {}, {}), "model.bin")
    assert str(error.value) == ("jinja2: not installed, expected it for the chat template of this model; run pip "
                                "install 'jinja2>=3.1.6' (the extra `text`)")


def test_each_template_is_compiled_once(monkeypatch):
    made, texts = template.Templates({"default": "{{ messages | length }}"}, {}), []
    compiled = made._environment.from_string
    monkeypatch.setattr(made._environment, "from_string", lambda text: (texts.append(text), compiled(text))[1])
    request = {"messages": USER, "tools": None, "documents": None, "add_generation_prompt": True,
               "continue_final_message": False, "values": {}, "adapts": False, "most": 9}
    assert [made.render(request), made.render(request)] == [{"text": "1"}] * 2 and len(texts) == 1
