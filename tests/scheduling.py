"""A scheduler that a test drives turn by turn."""

from colibri.requests import Request
from colibri.scheduler import Scheduler

CHUNK = 32


def make(engine, monkeypatch, queue_size=3):
    """A scheduler that turn() drives; calls: what each step was given, [(session, tokens), ...], sessions by number."""
    made = Scheduler(engine, queue_size, CHUNK, lambda: None)
    made.calls, seen = [], {}

    def step(work, samplers):
        made.calls.append([(seen.setdefault(session, len(seen)), len(tokens)) for session, tokens in work])
        return type(engine).advance(engine, work, samplers)
    monkeypatch.setattr(engine, "advance", step)
    return made


def request(prompt, max_new_tokens, **fields):
    return Request(fields.pop("id", prompt[:3]), prompt=list(prompt), max_new_tokens=max_new_tokens, **fields)


def submit(scheduler, item):
    scheduler.reserve(item.id)
    scheduler.enter(item)


def turn(scheduler, count=1):
    for _ in range(count):
        scheduler._turn()


def finish(scheduler, *requests):
    for _ in range(2000):
        if all(request.finish for request in requests):
            return
        scheduler._turn()
    raise AssertionError("no end")


def alone(engine, request):
    with engine.session() as session:
        return list(session.generate(request.prompt, request.max_new_tokens, **request.sampler._asdict()))
