"""Chats with a model that has a template: over HTTP, in the terminal, and drawn as the model's authors set it."""

import contextlib
import functools
import http.client
import itertools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import text_models
from asking import ask
from conftest import ROOT, program
from refusals import line_of
from service import SLOW, TIMEOUT, Service

from colibri.checkpoint import Checkpoint
from colibri.text import codec

ANSWER = " is the"
TURNS = ("{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
         "{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.function.name }} "
         "{{ call.function.arguments | tojson }}{% endfor %}"
         "<|im_end|>{% endfor %}")
BEGIN = ("{% if add_generation_prompt %}<|im_start|>assistant\n{% if not thinking | default(true) %}-\n{% endif %}"
         "{% endif %}")
REFUSES = "{% if messages[-1].content == 'stop' %}{{ raise_exception('never say ' ~ messages[-1].content) }}{% endif %}"
FORGETS = "{% for m in messages %}<|im_start|>{{ m.role if loop.last else loop.index }}\n{{ m.content }}{% endfor %}"
TEMPLATES = {"plain": "{{ bos_token }}" + REFUSES + TURNS + BEGIN, "forgets": FORGETS + BEGIN, "broken": "{% for %}"}


def made(folder, template, **files):
    """A .bin that answers ANSWER after a line's end, and ends it; its tokenizer.json puts BOS before a prompt."""
    tokenizer = text_models.byte_fallback(["▁the", "▁is", "▁It", "▁user", "▁assistant"], adds_bos=True)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    number = tokenizer.token_to_id
    said = ["<0x0A>", "▁is", "▁the", "<|im_end|>"]
    text_models.chain(
        folder, {number(a): number(b) for a, b in itertools.pairwise(said)}, tokenizer.get_vocab_size(),
        tokenizer=tokenizer.to_str(),
        tokenizer_config={"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": template}, **files)
    path = folder.with_suffix(".bin")
    converted = program("converter", folder, path)
    assert converted.returncode == 0 and converted.stderr == b"", converted.stderr
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    return {name: made(folder / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def model(models):
    return models["plain"]


@pytest.fixture(scope="module")
def service(model):
    with Service(model, model.parent) as service:
        yield service
        assert service.stop() == 0 and "fault" not in service.log


def tokens_of(model, text):
    return codec(Checkpoint(model), False).encode(text.encode(), special=False)


def user(content="It is"):
    return {"role": "user", "content": content}


def chat(service, model, *messages, **fields):
    """(status, the answer) of a chat."""
    status, _, text = ask(service, "POST", "/v1/chat/completions",
                          {"model": model.name, "messages": list(messages), "max_tokens": 9, **fields})
    return status, text if fields.get("stream") else json.loads(text)


# HTTP

@pytest.mark.parametrize("messages, fields, text", [
    ([user()], {}, "<|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n"),
    ([user()], {"add_special_tokens": False}, "<|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n"),
    ([user([{"type": "text", "text": "It"}, {"type": "text", "text": " is"}])], {},
     "<|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n"),
    ([{"role": "critic", "content": "the", "name": "x", "refusal": None}, user()],
     {"chat_template_kwargs": {"thinking": False}},
     "<|im_start|>critic\nthe<|im_end|><|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n-\n"),
    ([user()], {"tools": [{"type": "function", "function": {"name": "é"}}], "tool_choice": "auto"},
     ('<tools>[{"type": "function", "function": {"name": "é"}}]</tools><|im_start|>user\nIt is<|im_end|>'
      "<|im_start|>assistant\n")),
    ([user()], {"tools": [{"type": "function"}], "tool_choice": "none"},
     "<|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n"),
    ([user(), {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {
        "name": "f", "arguments": '{"a":1}'}}]}, {"role": "tool", "content": "the", "tool_call_id": "1"}],
     {"tools": []},
     ('<|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n<call>f {"a": 1}<|im_end|><|im_start|>tool\n'
      "the<|im_end|><|im_start|>assistant\n"))])
def test_a_chat_by_its_template(service, model, messages, fields, text):
    """BOS is the template's own, once; special tokens in the text are tokens."""
    expected = tokens_of(model, f"<s>{text}")
    assert expected[0] == 1 and expected.count(1) == 1
    status, answer = chat(service, model, *messages, **fields)
    assert status == 200, answer
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]) == (ANSWER, len(expected))
    assert answer["choices"][0]["finish_reason"] == "stop"
    status, answer = chat(service, model, *messages, **fields, stream=True)
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ANSWER


def test_special_tokens_that_are_asked_for(service, model):
    """tokenizer.json's own BOS comes before a text that has none, and not before one that has."""
    with_bos = chat(service, model, user(), add_special_tokens=True)[1]["usage"]["prompt_tokens"]
    assert with_bos == chat(service, model, user())[1]["usage"]["prompt_tokens"]


def test_a_message_that_goes_on(service, model):
    text = "<s><|im_start|>user\nIt<|im_end|><|im_start|>assistant\n is"
    messages = [user("It"), {"role": "assistant", "content": " is"}]
    for fields in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        status, answer = chat(service, model, *messages, **fields)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, len(tokens_of(model, text)))
    status, answer = chat(service, model, *messages, add_generation_prompt=False)
    assert answer["usage"]["prompt_tokens"] == len(tokens_of(model, f"{text}<|im_end|>"))


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NAMED = '{"type": "function", "function": {"name": ...}}'
CALL = 'an object such as {"type": "function", "function": {"name": ...}}'


@pytest.mark.parametrize("messages, fields, message, param", [
    ([user("stop")], {}, 'messages: chat template: "never say stop", expected messages that it takes', "messages"),
    ([user(5)], {}, 'messages[0].content: 5, expected a string, or a list of {"type": "text", "text": ...}',
     "messages[0].content"),
    ([user([{"type": "image_url"}])], {},
     'messages[0].content[0]: an object, expected {"type": "text", "text": ...}; the model takes text alone',
     "messages[0].content[0]"),
    ([user(None)], {}, "messages[0].content: missing, expected a string, or a list of parts", "messages[0].content"),
    ([{"content": "x"}], {}, "messages[0].role: null, expected a string such as user", "messages[0].role"),
    (["x"], {}, 'messages[0]: "x", expected an object with a role', "messages[0]"),
    ([], {}, "messages: no message, expected a list of at least one message", "messages"),
    ([{"role": "assistant", "tool_calls": 5}], {}, "messages[0].tool_calls: 5, expected a list of tool calls",
     "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], {},
     f"messages[0].tool_calls[0]: an object, expected {CALL}",
     "messages[0].tool_calls[0]"),
    ([user()], {"tools": {}}, "tools: an object, expected a list of objects", "tools"),
    ([user()], {"tools": [5]}, "tools[0]: 5, expected an object", "tools[0]"),
    ([user()], {"tools": [{}]}, "tools[0].function: null, expected an object with a name", "tools[0].function"),
    ([user()], {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 'tools[0].type: "custom", expected function',
     "tools[0].type"),
    ([user()], {"tools": [tool("")]}, 'tools[0].function.name: "", expected a string of 1 to 64 characters',
     "tools[0].function.name"),
    ([user()], {"tools": [tool("f"), tool("f")]}, 'tools[1].function.name: "f" twice, expected a name of its own',
     "tools[1].function.name"),
    ([user()], {"tools": [tool("f", [])]}, "tools[0].function.parameters: a list, expected a JSON schema, an object",
     "tools[0].function.parameters"),
    ([user()], {"tools": [tool("f", functools.reduce(lambda inner, _: {"not": inner}, range(46), {}))]},
     ("tools[0]: nested more deeply than 48 objects and lists, expected fewer; give names to parts of its schema in "
      "$defs"),
     "tools[0]"),
    ([user()], {"tools": [tool(str(number)) for number in range(129)]}, "tools: 129 tools, expected at most 128",
     "tools"),
    ([user()], {"tools": [tool("f")], "tool_choice": "required"},
     'tool_choice: "required", not supported, expected auto or none; leave it out', "tool_choice"),
    ([user()], {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice: an object, not supported, expected auto or none; leave it out", "tool_choice"),
    ([user()], {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     'tool_choice.function.name: "g", expected the name of one of tools', "tool_choice.function.name"),
    ([user()], {"tools": [tool("f")], "tool_choice": "any"},
     f'tool_choice: "any", expected none, auto, required, or {NAMED}', "tool_choice"),
    ([user()], {"tool_choice": "required"}, 'tool_choice: "required", expected tools; give some', "tool_choice"),
    ([user(), {"role": "tool", "content": "x", "tool_call_id": 5}], {},
     "messages[1].tool_call_id: 5, expected a string, the id of a tool call", "messages[1].tool_call_id"),
    ([user()], {"chat_template_kwargs": []}, "chat_template_kwargs: a list, expected an object of names and values",
     "chat_template_kwargs"),
    ([user()], {"chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs: messages, expected no field of the request's own; put it beside messages",
     "chat_template_kwargs"),
    ([user()], {"reasoning_effort": 3}, "reasoning_effort: 3, expected a string", "reasoning_effort"),
    ([user()], {"continue_final_message": 1}, "continue_final_message: 1, expected true or false",
     "continue_final_message"),
    ([user()], {"continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message: true, with add_generation_prompt true, expected one of them; leave one out",
     "continue_final_message"),
    ([user()], {"chat_template": "x"}, '"chat_template": unsupported field, expected one of', "chat_template"),
    ([user("\ud83d")], {}, "messages: half a surrogate pair, expected text; send whole characters", "messages"),
    ([user("x" * 5000)], {}, "messages: more than 3200 characters by the chat template, expected fewer", "messages")])
def test_catalogue(service, model, messages, fields, message, param):
    most = f"{128 * codec(Checkpoint(model), False).longest} characters"
    status, answer = chat(service, model, *messages, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["message"].startswith(message.replace("3200 characters", most))
    assert answer["error"]["code"] == ("too_long" if "more than" in message else "bad_request")


def test_a_broken_template(models, tmp_path):
    """Completions are served, and so is what asks for the model; a chat hears what is wrong."""
    model = models["broken"]
    with Service(model, tmp_path) as service:
        status, answer = chat(service, model, user())
        assert (status, answer["error"]["code"]) == (400, "bad_request")
        assert answer["error"]["message"].startswith(f'{model}: chat template default: "line 1: ')
        status, _, text = ask(service, "POST", "/v1/completions", {"model": model.name, "prompt": "It\n",
                                                                   "max_tokens": 4})
        assert status == 200 and json.loads(text)["choices"][0]["text"] == ANSWER
        assert service.stop() == 0


def test_the_start_says_what_there_is(service, models, moe_32, tmp_path):
    assert "no chat template" not in service.log
    with Service(moe_32, tmp_path) as other:
        assert (f"serving moe-32.bin on unix:{tmp_path}/socket, http 127.0.0.1:{other.port}, no chat template\n"
                in other.log)
    with Service(moe_32, tmp_path, "--serve", f"unix:{tmp_path}/lines") as other:
        assert "template" not in other.log


def test_other_clients_go_on_beside_a_template_that_never_ends(tmp_path):
    loop = "{% for i in range(100000) %}{% for i in range(100000) %}{% endfor %}{% endfor %}"
    model = made(tmp_path / "loop", "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}ok\n")
    with Service(model, tmp_path) as service:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service.port)) as slow:
            slow.request("POST", "/v1/chat/completions", json.dumps({"model": model.name, "messages": [user("loop")]}))
            for _ in range(20):
                status, _, text = ask(service, "POST", "/v1/completions",
                                      {"model": model.name, "prompt": "It\n", "max_tokens": 4})
                assert status == 200 and json.loads(text)["choices"][0]["text"] == ANSWER
            assert chat(service, model, user())[0] == 200
            assert not select.select([slow.sock], [], [], 0)[0]
        assert service.stop() == 0


# The terminal

def talk(model, lines, *options):
    """(the answers, the figures) of a conversation."""
    arguments = ("colibri.run", "--model", model, "--backend", "host", "--chat", *options)
    text = program(*arguments, input=lines.encode())
    assert text.returncode == 0, text.stderr
    figures = program(*arguments, "--json", input=lines.encode())
    assert figures.returncode == 0 and b"\nP99 latency: " in text.stdout
    return text.stdout.decode().partition("\n\nbackend ")[0].split("\n"), json.loads(figures.stdout)


def test_a_conversation(model):
    answers, figures = talk(model, "It is\n\nis the\r\nIt\n", "--system", "the")
    said = [{"role": "system", "content": "the"}]
    lengths, text = [], "<s><|im_start|>system\nthe<|im_end|>"
    for content in ("It is", "is the", "It"):
        said += [user(content), {"role": "assistant", "content": ANSWER}]
        text += f"<|im_start|>user\n{content}<|im_end|><|im_start|>assistant\n"
        lengths.append(len(tokens_of(model, text)))
        text += f"{ANSWER}<|im_end|>"
    assert answers == [ANSWER] * 3 and figures["messages"] == said
    assert (figures["turns"], figures["prompt_tokens"], figures["new_tokens"]) == (3, sum(lengths), 6)
    assert figures["computed_tokens"] == lengths[2] - 2 * 2  # each token once; of an answer the loop feeds both itself


def test_a_template_that_changes_what_was_said(models):
    """Each prompt is computed anew."""
    answers, figures = talk(models["forgets"], "It\nis\n")
    assert answers == [ANSWER] * 2 and figures["computed_tokens"] == figures["prompt_tokens"]


def test_a_conversation_without_a_template(moe_32):
    """In today's form, which HTTP has, too."""
    answers, figures = talk(moe_32, "Hello\nWho?\n", "--max-new-tokens", 7)
    said = ""
    for content, answer in zip(("Hello", "Who?"), figures["messages"][1::2]):
        said += f"user: {content}\n"
        alone = json.loads(program("colibri.run", "--model", moe_32, "--backend", "host", "--prompt",
                                   f"{said}assistant:",
                                   "--max-new-tokens", 7, "--json").stdout)
        assert answer["content"] == alone["text"]
        said += f"assistant: {alone['text']}\n"
    assert "\n".join(answers).count(figures["messages"][1]["content"]) >= 1
    started = program("colibri.run", "--model", moe_32, "--chat", input=b"")
    assert (started.returncode, started.stdout, started.stderr.decode()) == (
        0, b"", f"{moe_32}: no chat template; messages become lines, role: content\n")


@pytest.mark.parametrize("name, lines, message", [
    ("plain", b"It\nstop\n", '--chat: chat template: "never say stop", expected messages that it takes'),
    ("plain", b"\xff\n", "--chat: a line that is not UTF-8, expected text; convert it first"),
    ("plain", b"It " * 50, "--chat: 60 tokens of conversation, expected at most 32, the context of this run")])
def test_what_ends_a_conversation(models, name, lines, message):
    ended = program("colibri.run", "--model", models[name], "--backend", "host", "--chat", "--context", 32, input=lines)
    assert ended.returncode == 2 and ended.stderr.decode().startswith(message) and ended.stderr.count(b"\n") == 1


def test_a_broken_template_of_a_conversation(models):
    line = line_of(program("colibri.run", "--model", models["broken"], "--chat", input=b"It\n"))
    assert line.startswith(f'{models["broken"]}: chat template default: "line 1: ')


@pytest.mark.parametrize("options, message", [
    (["--system", "x"], "--system: given, expected only with --chat; leave it out"),
    (["--prompt", "x", "--system", "x"], "--system: given, expected only with --chat; leave it out"),
    (["--chat", "--prompt", "x"], "--prompt: given, expected only without --chat; leave it out"),
    (["--chat", "--repeat", "2"], "--repeat: given, expected only without --chat; leave it out"),
    (["--chat", "--serve", "-"], "--chat: given, expected only without --serve and --http; leave it out"),
    (["--chat", "--drain", "2"], "--drain: given, expected only with --serve or --http; leave it out"),
    (["--temperature", "1"], "--temperature: given, expected only with --prompt or --chat; leave it out")])
def test_options(moe_32, options, message):
    assert line_of(program("colibri.run", "--model", moe_32, *options)) == message


class Terminal:
    """colibri.run --chat in a terminal of its own."""

    def __init__(self, model, *options, program=("-m", "colibri.run")):
        self.master, slave = pty.openpty()
        command = [sys.executable, *program, "--backend", "host", "--model", str(model), "--chat", *options]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT,
                                        start_new_session=True,
                                        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"})
        os.close(slave)
        self.text = ""

    def wait_for(self, text):
        """Waits until a text comes, and returns what came with it; text that came before does not count."""
        end = time.monotonic() + TIMEOUT
        while text not in self.text:
            assert time.monotonic() < end, self.text
            try:
                self.text += os.read(self.master, 1000).decode(errors="replace")
            except OSError:
                assert False, self.text
        before, _, self.text = self.text.partition(text)
        return before + text

    def type(self, text):
        os.write(self.master, text.encode())

    def rest(self):
        """What comes until the program ends, and its status."""
        while True:
            try:
                if not (data := os.read(self.master, 1000)):
                    break
            except OSError:
                break
            self.text += data.decode(errors="replace")
        return self.text, self.process.wait(TIMEOUT)


def test_a_terminal(model):
    terminal = Terminal(model)
    terminal.wait_for("Ctrl-C ends an answer, Ctrl-D the conversation\r\n")
    for content in ("It is", "the"):
        terminal.wait_for("> ")
        terminal.type(f"{content}\n")
        terminal.wait_for(f"{ANSWER}\r\n")
    terminal.wait_for("> ")
    terminal.type("\4")
    text, status = terminal.rest()
    assert status == 0 and "P99 latency: " in text


def test_reasoning_in_a_terminal(tmp_path):
    """In dim letters, before the answer."""
    begin = "{% if add_generation_prompt %}<think>\n{% endif %}"
    terminal = Terminal(made(tmp_path / "thinks", "{# </think> #}" + TURNS + begin))
    terminal.wait_for("> ")
    terminal.type("It is\n")
    terminal.wait_for(f"\x1b[2m{ANSWER.lstrip()}\x1b[0m\r\n")
    terminal.wait_for("> ")
    terminal.type("\4")
    assert terminal.rest()[1] == 0


def test_ctrl_c_ends_an_answer(moe_32):
    """The next message is answered. Where no answer runs, it ends the program."""
    slow = SLOW.replace("Engine.advance, Engine.stack = ",
                        "Engine.step = slow(Engine.step)\nEngine.advance, Engine.stack = ")
    terminal = Terminal(moe_32, program=("-c", slow))
    for _ in range(2):
        terminal.wait_for("> ")
        terminal.type("What a name!\n")
        terminal.wait_for("!\r\n")
        said = ""
        while len(said) < 3:
            said += os.read(terminal.master, 100).decode(errors="replace")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert len(terminal.wait_for("\r\n")) < 100
    terminal.wait_for("> ")
    os.kill(terminal.process.pid, signal.SIGINT)
    text, status = terminal.rest()
    assert status == 130 and "interrupted" in text and "Traceback" not in text


# How answers are drawn

@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The example model whose authors have set how its text is drawn."""
    folder = tmp_path_factory.mktemp("drawn") / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").symlink_to(ROOT / "models" / "moe-32.pt")
    (folder / "config.json").write_bytes((ROOT / "models" / "moe-32.json").read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.75, "top_p": 0.875,
                                                               "top_k": 24}))
    path = folder.with_suffix(".bin")
    assert program("converter", folder, path).returncode == 0
    return path


SET = ("--temperature", 0.75, "--top-p", 0.875, "--top-k", 24)


@pytest.mark.parametrize("given, equal", [
    ((), SET), (("--temperature", 0), ()), (("--temperature", 1.5), ("--temperature", 1.5, *SET[2:])),
    (("--top-p", 0.5, "--top-k", 0), (*SET[:2], "--top-p", 0.5)), (("--seed", 5), (*SET, "--seed", 5))])
def test_a_run_draws_as_the_authors_set_it(drawn, moe_32, given, equal):
    text = {model: json.loads(program("colibri.run", "--model", model, "--backend", "host", "--prompt", "It was ",
                                      "--max-new-tokens", 60, "--json", *options).stdout)["text"]
            for model, options in ((drawn, given), (moe_32, equal))}
    assert text[drawn] == text[moe_32]


def test_the_table_says_how(drawn, moe_32):
    def line(model, *options):
        table = program("colibri.run", "--model", model, "--backend", "host", "--prompt", "It", "--max-new-tokens", 2,
                        *options).stdout
        return next((line for line in table.decode().split("\n") if line.startswith("sampling")), None)
    assert line(drawn) == "sampling    temperature 0.75 (the model), top_k 24 (the model), top_p 0.875 (the"
    assert line(drawn, "--temperature", 0) is line(moe_32) is None
    assert line(moe_32, "--temperature", 0.5, "--top-k", 3) == "sampling    temperature 0.5, top_k 3, seed 0"
    latency = program("colibri.run", "--model", drawn, "--backend", "host", "--seq-len", 8, "--max-new-tokens", 2,
                      "--repeat", 1)
    assert latency.returncode == 0 and b"sampling" not in latency.stdout
    assert line_of(program("colibri.run", "--model", drawn, "--prompt", "It", "--temperature", 0, "--top-k", 3)) == (
        "--top-k: given, expected only with --temperature above 0, without which the likeliest token is taken; give "
        "--temperature 1, or leave it out")


def test_a_service_draws_as_the_authors_set_it(drawn, moe_32, tmp_path):
    prompt = {"prompt": "It was ", "max_new_tokens": 40, "seed": 3}
    values = {"temperature": 0.75, "top_p": 0.875, "top_k": 24}
    with Service(moe_32, tmp_path) as service, service.client() as client:
        explicit = [client.ask(**prompt, **values)["text"], client.ask(**prompt)["text"],
                    client.ask(**prompt, **{**values, "temperature": 2})["text"]]
    with Service(drawn, tmp_path) as service, service.client() as client:
        assert [client.ask(**prompt)["text"], client.ask(**prompt, temperature=0)["text"],
                client.ask(**prompt, temperature=2)["text"]] == explicit
        body = {"model": "model.bin", "prompt": "It was ", "max_tokens": 40, "seed": 3, "temperature": None}
        assert json.loads(ask(service, "POST", "/v1/completions", body)[2])["choices"][0]["text"] == explicit[0]
        assert ", no chat template, temperature 0.75, top_p 0.875, top_k 24\n" in service.log


def test_a_conversation_draws_as_the_authors_set_it(drawn, moe_32):
    assert (talk(drawn, "Hello\n", "--max-new-tokens", 20)[1]["messages"]
            == talk(moe_32, "Hello\n", "--max-new-tokens", 20, *SET)[1]["messages"])
