"""Chats: a conversation becomes a prompt by the model's own template, rendered by a process of its own."""

import importlib.util
import json

from colibri.errors import ColibriError, printable
from colibri.processes import NotStarted, Processes, why_ended

MOST = 64 << 20  # characters of a prompt
END = 256          # characters that are kept of a prompt's end
CPU_SECONDS = 5    # of a rendering


class NotRendered(ColibriError):
    """No prompt came of a conversation. code: bad_request, too_long, or internal where it is not the conversation's
    fault.
    """

    def __init__(self, code, *parts):
        super().__init__(*parts)
        self.code = code


class Conversation:
    """Messages and what else a template sees of a request.

    messages: [{"role": ..., "content": ...}, ...]. tools, documents: as templates take them, or None. values: more
    names that the template sees. adapts: messages are OpenAI's, whose form the template may not take

    end: of the prompt, once that is made. start: of the answer, what of the last message it goes on from
    """

    def __init__(self, chat, messages, tools=None, documents=None, add_generation_prompt=True,
                 continue_final_message=False, values=None, adapts=False):
        self._chat, self.tools, self.end = chat, tools, ""
        self.start = messages[-1].get("content") if continue_final_message and messages else None
        fields = {"messages": messages, "tools": tools, "documents": documents, "adapts": adapts,
                  "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
                  "values": values or {}}
        try:
            self._fields = json.dumps(fields)[:-1]
        except RecursionError:
            raise ColibriError("messages", "nested too deeply", "plain fields") from None

    def text(self, most=MOST, where="messages"):
        """Returns the prompt. Raises NotRendered. most: characters that it may have. where: its name in errors"""
        text = self._chat.render(f'{self._fields}, "most": {most}}}\n'.encode(), most, where)
        self.end = text[-END:]
        return text


class Chat(Processes):
    """A model's chat templates. Renders on whichever threads ask, each with a process of its own while it does."""

    def __init__(self, settings, path):
        """settings: a Checkpoint's, with a template. path: the model's, for errors."""
        if importlib.util.find_spec("jinja2") is None:
            raise ColibriError("jinja2", "not installed", "it for the chat template of this model",
                               "run pip install 'jinja2>=3.1.6' (the extra `text`)")
        self._path = path
        first = json.dumps([CPU_SECONDS, settings.chat_templates, settings.special_tokens]).encode() + b"\n"
        super().__init__("template", first, "chat template")

    def render(self, line, most, where):
        """Returns the prompt of a Conversation's line; see Conversation.text."""
        try:
            answer, status = self.ask(line)
        except NotStarted as error:
            raise NotRendered("internal", *error.parts) from None
        if answer is None:
            raise NotRendered("bad_request", where, f"chat template: {why_ended(status, CPU_SECONDS)}",
                              "a prompt before that", "send less")
        if "text" in answer:
            return answer["text"]
        raise self._error(answer["kind"], printable(answer["error"]), most, where)

    def _error(self, kind, text, most, where):
        if kind == "long":
            return NotRendered("too_long", where, f"more than {most} characters by the chat template", "fewer")
        if kind == "name":
            return NotRendered("bad_request", self._path, f"chat templates {text}", "one called default",
                               "convert a folder that has it")
        if kind == "broken":
            name, _, text = text.partition(": ")
            return NotRendered("bad_request", self._path, f'chat template {name}: "{text}"', "Jinja",
                               "correct it, and convert again")
        return NotRendered("bad_request", where, f'chat template: "{text}"', "messages that it takes")


def transcript(messages):
    """Returns messages as a prompt where the model has no template: `role: content`, a line each."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
