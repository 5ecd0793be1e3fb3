"""Chats: a conversation becomes a prompt by the model's own template, rendered by a process of its own."""

import collections
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

from colibri.errors import ColibriError, printable

ROOT = Path(__file__).resolve().parent.parent
START = "import sys; sys.path[:0] = [sys.argv[1]]; from colibri.template import main; main()"
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


class Chat:
    """A model's chat templates. Renders on whichever threads ask, each with a process of its own while it does."""

    def __init__(self, settings, path):
        """settings: a Checkpoint's, with a template. path: the model's, for errors."""
        if importlib.util.find_spec("jinja2") is None:
            raise ColibriError("jinja2", "not installed", "it for the chat template of this model",
                               "run pip install 'jinja2>=3.1.6' (the extra `text`)")
        self._path = path
        self._first = json.dumps([CPU_SECONDS, settings.chat_templates, settings.special_tokens]).encode() + b"\n"
        self._idle, self._busy = collections.deque([self._process()]), set()

    def render(self, line, most, where):
        """Returns the prompt of a Conversation's line; see Conversation.text."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._process()
        self._busy.add(process)
        try:
            answer = _ask(process, line)
        except BaseException:  # of Ctrl-C: the answer is still to come
            _stop(process)
            raise
        finally:
            self._busy.discard(process)
        if answer is None:
            raise NotRendered("bad_request", where, f"chat template: {_end(_stop(process))}", "a prompt before that",
                              "send less")
        self._idle.append(process)
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

    def _process(self):
        try:
            process = subprocess.Popen([sys.executable, "-c", START, ROOT], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise NotRendered("internal", "chat template", f"no process for it: {error.strerror}", "one",
                              "raise the limits of processes and memory (ulimit -u and -v)") from None
        with contextlib.suppress(BrokenPipeError):  # who asks it finds that it has ended
            process.stdin.write(self._first)
            process.stdin.flush()
        return process

    def close(self):
        """Ends the processes, also those at work, of which other threads then hear."""
        for process in list(self._busy):
            process.kill()
        while self._idle:
            _stop(self._idle.pop())


def _ask(process, line):
    """Returns a process's answer; None where it has ended, or ends."""
    try:
        process.stdin.write(line)
        process.stdin.flush()
        data = process.stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(data) if data.endswith(b"\n") else None


def _stop(process):
    """Ends a process, unless it has ended, and returns its status."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # of what it has not read
            pipe.close()
    process.kill()
    return process.wait()


def _end(status):
    """Returns why a process ended."""
    if status == -signal.SIGPROF:
        return f"more than {CPU_SECONDS} s of computing"
    return f"its process ended with {signal.Signals(-status).name if status < 0 else status}"


def transcript(messages):
    """Returns messages as a prompt where the model has no template: `role: content`, a line each."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
