"""Gives a config.json's values by name and kind, and refuses what Colibri cannot honour."""

import json

from colibri.errors import ColibriError


def once(pairs):
    """Returns a JSON object whose keys must each be there once, for json's object_pairs_hook."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"{twice!r} stands there twice")
    return result


class Values:
    """Holds a config file's values, each asked for by name and kind. prefix: stands before names in errors."""

    def __init__(self, values, where, prefix=""):
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, names, kind=int, default=None):
        """Returns the value under the first of `names` ("a|b") that is there; others there must agree. A dot goes
        deeper.
        """
        found = [(name, value) for name in names.split("|") if (value := self._at(name)) is not None]
        if not found:
            return default
        name, value = found[0]
        kinds = (int, float) if kind is float else (kind,)
        if type(value) not in kinds or (kind in (int, float) and not 0 <= value < 2 ** 32):
            raise self.bad(name, value, f"{kind.__name__}, not negative" if kind in (int, float) else kind.__name__)
        other = next((pair for pair in found if pair[1] != value), None)
        if other:
            raise self.bad(other[0], other[1], f"{value!r} as in {name}")
        return kind(value) if kind is float else value

    def need(self, names, kind=int):
        value = self.get(names, kind)
        if value is None:
            raise ColibriError(self.where, f"{self.prefix}{names.split('|')[0]} is not there", kind.__name__,
                               "complete the config")
        return value

    def flag(self, names, default=False):
        return int(self.get(names, bool, default))

    def accept(self, key, allowed):
        value = self._at(key)
        if value is not None and value not in allowed:
            rule = " or ".join(map(json.dumps, allowed)) or "a config without it, since it is not supported"
            raise self.bad(key, value, rule)

    def bad(self, key, value, expected):
        return ColibriError(self.where, f"{self.prefix}{key}={json.dumps(value)[:80]}", expected,
                            "correct the config, or it asks for what Colibri does not compute")

    def _at(self, path):
        value, keys = self.values, path.split(".")
        for depth, key in enumerate(keys):
            if value is not None and type(value) is not dict:
                raise self.bad(".".join(keys[:depth]), value, "an object")
            value = None if value is None else value.get(key)
        return value
