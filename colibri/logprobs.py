"""Log-probabilities as answers have them: of lines, of OpenAI's chats and completions, and of vLLM's prompts."""

LEAST = -9999.0  # in place of minus infinity, which JSON does not have


def of_line(score):
    """Returns a token's log-probability, and the likeliest tokens in its place as [[token, log-probability], ...]."""
    return {"logprob": max(score.logprob, LEAST), "top_logprobs": [list(pair) for pair in _top(score)]}


def of_lines(request):
    """Returns what the last line has of those that a request asked for: of all tokens, the one that ended it too."""
    found = {}
    if request.sampler.prompt_logprobs is not None:
        found["prompt_logprobs"] = [score and {"token": score.token, **of_line(score)} for score in of_prompt(request)]
    if request.sampler.logprobs is not None:
        found["logprobs"] = [{"token": score.token, **of_line(score)} for score in of_answer(request)]
    return found


def of_answer(request):
    """Returns the Scores of the answer's tokens, and of the one that ended it."""
    return [request.score(index) for index in range(len(request.tokens) + (request.ending is not None))]


def of_prompt(request):
    """Returns the Scores of the prompt's tokens, as far as it was read; None of the first, which nothing precedes."""
    known = request.history.scores if request.history else {}
    return [None] + [known[position] for position in range(1, len(request.prompt)) if position in known]


def _top(score, count=None):
    """Returns [(token, log-probability)] of the likeliest tokens, best first."""
    return [(token, max(logprob, LEAST)) for token, logprob in zip(score.top[:count].tolist(),
                                                                   score.top_logprobs[:count].tolist())]


class Names:
    """Tells what tokens are called. used: a Codec; None: they are numbers."""

    def __init__(self, used):
        self._used, self._known = used, {}

    def __getitem__(self, token):
        """Returns (text, bytes or None)."""
        if token not in self._known:
            self._known[token] = (str(token), None) if self._used is None else self._used.name(token)
        return self._known[token]


def chat(scores, names, count):
    """Returns the logprobs of a chat's choice. count: of the likeliest tokens of each"""
    def entry(token, logprob):
        text, data = names[token]
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": None if data is None else list(data)}

    content = [{**entry(score.token, score.logprob),
                "top_logprobs": [entry(*pair) for pair in _top(score, count)]} for score in scores]
    return {"content": content, "refusal": None}


def completion(tokens, scores, offsets, names, count):
    """Returns the logprobs of a completion's choice.

    scores: of the tokens, None where there is none. Where several of the likeliest are called the same, the best one
    stands; but the token's own entry is its own.
    """
    tops = []
    for score in scores:
        top = {}
        for token, logprob in _top(score, count) if score else ():
            top.setdefault(names[token][0], logprob)
        if score:
            top[names[score.token][0]] = max(score.logprob, LEAST)
        tops.append(top if score else None)
    return {"text_offset": offsets, "token_logprobs": [score and max(score.logprob, LEAST) for score in scores],
            "tokens": [names[token][0] for token in tokens], "top_logprobs": tops}


def prompt(scores, names, count):
    """Returns vLLM's prompt_logprobs: {token number: log-probability, rank and text} for each token but the first."""
    found = []
    for score in scores:
        if score is None:
            found.append(None)
            continue
        own = (score.token, max(score.logprob, LEAST), score.rank)
        top = [(token, logprob, rank) for rank, (token, logprob) in enumerate(_top(score, count), 1)]
        found.append({str(token): {"logprob": logprob, "rank": rank, "decoded_token": names[token][0]}
                      for token, logprob, rank in (own, *(each for each in top if each[0] != score.token))})
    return found
