"""What a model's authors say of text, as a .bin holds it: chat templates, special tokens, how an answer is drawn."""

import json
from collections import namedtuple

from colibri.errors import ColibriError
from colibri.sampling import Sampler, check_sampler

# chat_templates: {name: Jinja's text}. special_tokens: {"bos_token": "<s>", ...}, which templates see. sampling: of
# temperature, top_p and top_k those that the model's authors have set.
Settings = namedtuple("Settings", "chat_templates special_tokens sampling")
SAMPLING = ("temperature", "top_p", "top_k")


def read(data, path):
    """Returns the Settings in bytes of JSON, empty ones of None. path: the .bin's."""
    if data is None:
        return Settings({}, {}, {})
    try:
        values = json.loads(data)
        found = Settings(*(values.get(name, {}) for name in Settings._fields))
        texts = [*found.chat_templates.values(), *found.special_tokens.values()]
        good = all(type(text) is str for text in texts)
        sampling = {name: found.sampling[name] for name in SAMPLING if name in found.sampling}
        good = good and all(type(number) in (int, float) for number in sampling.values())
    except (ValueError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ColibriError(path, "settings that are no JSON object of texts and numbers", "what the converter writes",
                           "convert again")
    try:
        check_sampler(Sampler(**sampling))
    except ColibriError as error:
        raise ColibriError(f"{path}: sampling: {error.where}", error.got, error.expected, "convert again") from None
    return found._replace(sampling=sampling)
