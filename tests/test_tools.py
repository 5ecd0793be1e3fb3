"""Tools and reasoning over HTTP and in the terminal: models that say what they are made to say, and OpenAI's client."""

import functools
import itertools
import json
import random

import openai
import pydantic
import pytest
import text_models
from answers import assembled, plain, written
from asking import ask
from conftest import program
from service import TIMEOUT, Service
from tokenizers import AddedToken

from colibri.checkpoint import Checkpoint
from colibri.text import codec

CALLS = [("get_weather", {"city": "Zürich", "days": 2}), ("now", {})]
ANSWER = "It rains. "
TURNS = ("{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}"
         "<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > messages | length - 4 %}"
         "<think>{{ m.reasoning_content }}</think>{% endif %}"
         "{{ m.content }}{% for call in m.tool_calls %}({{ call.id | length }} {{ call.function.name }} "
         "{{ call.function.arguments.items() | list }}){% endfor %}{{ m.tool_call_id | length or '' }}<|im_end|>"
         "{% endfor %}")
BEGIN = ("{% if add_generation_prompt %}<|im_start|>assistant\n{% if messages[-1].role == 'tool' %}<|after|>{% else %}"
         "{{ '<think>\t' if special else '<think>\n' }}{% endif %}{% endif %}")
THOUGHT = "Where? There."
# Of each format what the model says: after <think> and a line's end where marks are text, after <think> and a tab where
# they are special tokens.
SAID = {"hermes": f"{THOUGHT}\n</think>\n\n{written('hermes', 'I look.', CALLS)}",
        "mistral-args": f"{THOUGHT}\n</think>{written('mistral-args', 'I look.', CALLS[:1])}"}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": WEATHER}},
         {"type": "function", "function": {"name": "now"}}]
USER = {"role": "user", "content": "Weather?"}


def pieces_of(text, source, seen):
    """A text in pieces, no two of which are the same; special tokens are some of them."""
    pieces = []
    while text:
        found = next((mark for mark in SPECIAL if text.startswith(mark)), None)
        most = min([text.find(mark) for mark in SPECIAL if text.find(mark) > 0] + [len(text)])
        sizes = [size for size in range(1, min(most, 6) + 1) if text[:size] not in (*seen, *pieces)]
        if not found and not sizes:
            return pieces_of("".join(pieces) + text, source, seen)  # other ones
        pieces.append(found or text[:source.choice(sizes)])
        text = text[len(pieces[-1]):]
    seen |= {*pieces}
    return pieces


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools") / "model"
    tokenizer, source = text_models.byte_fallback(), random.Random(1)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                  for text in ("<|im_start|>", "<|im_end|>", *SPECIAL)])
    seen = set(tokenizer.get_vocab()) - set(SPECIAL)
    chains = [[begin, *pieces_of(text, source, seen), "<|im_end|>"] for begin, text in (
        ("<think>\n", SAID["hermes"]), ("<think>\t", SAID["mistral-args"]), ("<|after|>", ANSWER))]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for chain in chains for piece in chain
                          if tokenizer.token_to_id(piece) is None])
    numbers = [[tokenizer.token_to_id(piece) for piece in chain] for chain in chains]
    assert sum(map(len,
                   numbers)) == len({number for chain in numbers for number in chain}) + 2  # the end alone is in all
    text_models.chain(folder, {before: after for chain in numbers for before, after in itertools.pairwise(chain)},
                      tokenizer.get_vocab_size(), tokenizer=tokenizer.to_str(), tokenizer_config={
                          "eos_token": "<|im_end|>", "chat_template": f"{{# <tool_call> #}}{TURNS}{BEGIN}"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    path = folder.with_suffix(".bin")
    converted = program("converter", folder, path)
    assert converted.returncode == 0, converted.stderr
    return path


@pytest.fixture(scope="module")
def services(model, tmp_path_factory):
    """Of each format one: that of the template, and one that is named."""
    with Service(model, tmp_path_factory.mktemp("a")) as hermes, \
            Service(model, tmp_path_factory.mktemp("b"), "--http", ":0", "--tool-format", "mistral-args") as mistral:
        hermes.kwargs, mistral.kwargs = {}, {"special": True}
        yield {"hermes": hermes, "mistral-args": mistral}
        for service in (hermes, mistral):
            assert service.stop() == 0 and "fault" not in service.log


def chat(service, *messages, **fields):
    """The answer to a chat: its first choice, or the deltas and the last event of a stream."""
    status, _, text = ask(service, "POST", "/v1/chat/completions", {
        "model": "model.bin", "messages": [USER, *messages], "tools": TOOLS, "chat_template_kwargs": service.kwargs,
        **fields})
    assert status == 200, text
    if not fields.get("stream"):
        return json.loads(text)["choices"][0]
    events = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    return [event["delta"] for event in events], events[-1]


@pytest.mark.parametrize("name, calls", [("hermes", CALLS), ("mistral-args", CALLS[:1])])
def test_an_answer_of_calls(services, name, calls):
    """Whole and streamed, as one of several choices, with special tokens in its text or not."""
    service = services[name]
    for fields in ({}, {"n": 2}, {"tool_choice": "auto"}, {"skip_special_tokens": False}, {"logprobs": True},
                   {"include_stop_str_in_output": True}, {"stop": "no such text"}, {"stop": ["rains", "Zurich"]}):
        choice = chat(service, **fields)
        said = plain(choice["message"])
        values = [json.loads(call["function"].pop("arguments")) for call in said["tool_calls"]]
        assert values == [values for _, values in calls], fields
        assert [call["function"]["name"] for call in said["tool_calls"]] == [name for name, _ in calls]
        assert (said["content"], said["reasoning_content"]) == ("I look.", THOUGHT)
        assert choice["finish_reason"] == "tool_calls"
        deltas, last = chat(service, **{**fields, "n": 1}, stream=True)
        assert assembled(deltas) == plain(chat(service, **{**fields, "n": 1})["message"])
        assert (last["finish_reason"], last["delta"]) == ("tool_calls", {})
        assert len([delta for delta in deltas if delta.get("reasoning_content")]) > 2


def test_tokens_of_a_stream_are_counted(services):
    """Each of them once, with its log-probability, however many events it brings."""
    service = services["hermes"]
    fields = {"stream": True, "logprobs": True, "stream_options": {"include_usage": True,
                                                                   "continuous_usage_stats": True}}
    text = ask(service, "POST", "/v1/chat/completions", {
        "model": "model.bin", "messages": [USER], "tools": TOOLS, **fields})[2]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    scores = [entry for event in events for choice in event["choices"] if choice["logprobs"]
              for entry in choice["logprobs"]["content"]]
    whole = chat(service, logprobs=True)
    assert counts == sorted(counts) and len(scores) == counts[-1] == len(whole["logprobs"]["content"])
    assert scores == whole["logprobs"]["content"]


def test_what_is_no_call_is_text(services):
    said = SAID["hermes"].split("</think>\n\n")[1]
    for fields in ({"tool_choice": "none"}, {"tools": None}, {"tools": []}):
        choice = chat(services["hermes"], **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
        assert "tool_calls" not in choice["message"]
    cut = chat(services["hermes"], stop="Zü")
    assert (cut["message"]["content"], cut["finish_reason"]) == (said[:said.index("Zü")], "stop")
    one = chat(services["hermes"], parallel_tool_calls=False)["message"]
    assert len(one["tool_calls"]) == 1 and one["content"] == f"I look.{said[said.rindex('<tool_call>') - 1:]}"
    special = services["mistral-args"]
    cut = chat(special, stop='"days"')["message"]  # the marks are special tokens, which text has not
    assert cut["content"] == 'I look.\nget_weather{"city": "Z\\u00fcrich", '
    assert chat(special, stop='"days"', skip_special_tokens=False)["message"]["content"] == (
        'I look.\n[TOOL_CALLS]get_weather[ARGS]{"city": "Z\\u00fcrich", ')


def test_every_length(services):
    """What is cut within a thought or a call: the stream and the whole are the same."""
    tokens = len(chat(services["hermes"], logprobs=True)["logprobs"]["content"])
    for count in range(1, tokens + 1):
        choice = chat(services["hermes"], max_tokens=count)
        deltas, last = chat(services["hermes"], max_tokens=count, stream=True)
        assert assembled(deltas) == plain(choice["message"])
        assert choice["finish_reason"] == last["finish_reason"] == "length"


def client_of(service):
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)


@pytest.mark.parametrize("name", SAID)
def test_a_loop_of_tools(services, model, name):
    """As agents have it: what was called goes back with what came of it; the template sees arguments as an object."""
    service, messages = services[name], [USER]
    create = functools.partial(client_of(service).chat.completions.create, model="model.bin", tools=TOOLS,
                               extra_body={"chat_template_kwargs": service.kwargs})
    first = create(messages=messages).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.reasoning_content == THOUGHT
    messages.append(first.message.model_dump(exclude_none=True))
    for call in first.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: 5"})
    last = create(messages=messages).choices[0]
    assert (last.message.content, last.finish_reason, last.message.tool_calls) == (ANSWER, "stop", None)
    rendered = rendering(service, model, messages)
    assert f"I look.(9get_weather{[('city', 'Zürich'), ('days', 2)]})".replace(" ", "") in rendered
    assert "<|im_start|>tool\nget_weather:59<|im_end|>" in rendered
    assert f"<think>{THOUGHT.replace(' ', '')}</" in rendered
    assert rendered.startswith("[get_weather][now]<|im_start|>user\nWeather?<|im_end|>")
    assert rendered.endswith("<|im_start|>assistant\n<|after|>")
    later = rendering(service, model, [*messages, {"role": "assistant", "content": ANSWER}, USER])
    assert THOUGHT.replace(" ", "") not in later  # the template drops what was thought earlier


def rendering(service, model, messages):
    """The prompt of messages without blanks, which a tokenizer adds and takes away."""
    text = ask(service, "POST", "/tokenize", {"messages": messages, "tools": TOOLS})[2]
    return codec(Checkpoint(model), False).with_special().decode(json.loads(text)["tokens"]).replace(" ", "")


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    model_config = pydantic.ConfigDict(title="get_weather")
    city: str
    days: int


def test_openai_puts_a_stream_together(services):
    service = services["hermes"]
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather"), TOOLS[1]]
    with client_of(service).chat.completions.stream(model="model.bin", messages=[USER], tools=[
            {**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": True}}, tools[0]]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = stream.get_final_completion().choices[0]
    assert [(event.name, event.index) for event in done] == [("get_weather", 0), ("now", 1)]
    assert choice.message.tool_calls[0].function.parsed_arguments == GetWeather(city="Zürich", days=2)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."


def test_reasoning_in_a_conversation(model):
    """It is not among the answers on stdout, but in the figures' messages and before the template."""
    said = SAID["hermes"].split("</think>\n\n")[1]
    arguments = ("colibri.run", "--model", model, "--backend", "host", "--chat")
    text = program(*arguments, input=b"Weather?\n")
    assert text.returncode == 0 and text.stdout.decode().startswith(f"{said}\n\nbackend ")
    figures = json.loads(program(*arguments, "--json", input=b"Weather?\n").stdout)
    assert figures["messages"] == [USER, {"role": "assistant", "content": said, "reasoning_content": THOUGHT}]
