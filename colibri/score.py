"""Scores: the log-likelihood of a text, in pieces of the context."""

import math

import numpy as np

from colibri.errors import ColibriError
from colibri.sampling import History, Sampler


def tokens_of(used, data):
    """Returns (tokens, bytes that are scored) of a text: each token has a score but the first.

    The first is what the model's tokenizer puts before a text, such as BOS, or the text's own first token.
    """
    text, begun = list(used.encode(data, "--score", False)), list(used.encode(data, "--score"))
    is_begun = begun[1:1 + len(text)] == text
    tokens = begun[:1] + text if is_begun else text
    if len(tokens) < 2:
        raise ColibriError("--score", used.count(text), "at least 2, since the first has none before it",
                           "take a longer text")
    return tokens, len(data) - (0 if is_begun else len(used.name(tokens[0])[1]))


def pieces(num_tokens, context):
    """Yields (start, end, first) of each piece: tokens start to end are read, those from `first` on are scored.

    Each piece begins with the last token of the one before; the last piece begins earlier, so that it is as long as the
    context.
    """
    first = 1
    while first < num_tokens:
        end = min(first - 1 + context, num_tokens)
        yield max(end - context, 0), end, first
        first = end


def scores(engine, tokens, meter, progress):
    """Returns the natural log-probabilities of tokens[1:], float64. progress: makes an iterator of the pieces"""
    found = np.empty(len(tokens) - 1)
    for start, end, first in progress(list(pieces(len(tokens), engine.context))):
        piece = tokens[start:end]
        history = History(Sampler(prompt_logprobs=0), piece, ())
        with engine.session() as session:
            meter.prefill(len(piece), engine.step, [(session, piece)], [history])
        found[first - 1:end - 1] = [history.scores[position].logprob for position in range(first - start, end - start)]
    return found


def figures(logprobs, num_bytes):
    """Returns what a run tells of the log-probabilities; None where a token's probability is 0."""
    total = math.fsum(logprobs)
    if total == -math.inf:
        return {"log_likelihood": None, "perplexity": None, "bits_per_byte": None, "scored_tokens": len(logprobs),
                "scored_bytes": num_bytes}
    mean = -total / len(logprobs)
    return {"log_likelihood": total, "perplexity": math.exp(mean) if mean < 700 else None,
            "bits_per_byte": -total / math.log(2) / num_bytes if num_bytes else None,
            "scored_tokens": len(logprobs), "scored_bytes": num_bytes}
