"""How a model's answers are taken apart: what its chat template says of calls and of thoughts."""

import math

from colibri.errors import ColibriError
from colibri.parts import THOUGHTS, Parts
from colibri.tool_formats import format_of

HARMONY = "harmony"  # whose answers have parts, tools or not


class Reading:
    """templates: {name: text} of a model. form: the tools' format, one of FORMATS; None: as the templates have it"""

    def __init__(self, templates, form=None):
        self._templates, self._form = templates, form
        if form and not templates:
            raise ColibriError("--tool-format", form, "a model that has a chat template", "leave it out")

    def form(self, has_tools=True):
        """Returns the format in which the model calls tools, or None."""
        return self._form or format_of(self._template(has_tools))

    def thought(self, conversation):
        """Returns (begin, end, whether the prompt has the begin) of what the model thinks before it answers, or None.

        What the prompt has is known once the Conversation has been rendered.
        """
        text = self._template(conversation.tools is not None)
        pair = next((pair for pair in THOUGHTS if any(mark in text for mark in pair)), None)
        return None if pair is None else (*pair, _is_within(conversation, *pair))

    def _template(self, has_tools):
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        return self._templates.get(name, "")

    def has_parts(self, conversation):
        """Returns whether the answer to a Conversation may have parts."""
        has_tools = conversation.tools is not None
        form = self.form(has_tools)
        return form == HARMONY or has_tools and form is not None or self.thought(conversation) is not None

    def parts(self, conversation, most=math.inf):
        """Returns the Parts of an answer to a Conversation that has been rendered. most: calls that it may have"""
        form = self.form(conversation.tools is not None)
        thought = self.thought(conversation) if form != HARMONY else None
        tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in conversation.tools or ()}
        return Parts(form, tools, thought and thought[:2], thought is not None and thought[2], most)


def _is_within(conversation, begin, end):
    """Returns whether a prompt ends within a thought."""
    if conversation.start is None:
        return conversation.end.rstrip().endswith(begin)
    start = conversation.start
    text = start if isinstance(start, str) else "".join(part.get("text", "") for part in start)
    return text.rfind(begin) > text.rfind(end)
