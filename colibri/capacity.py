"""Context: how many positions a session has, by the model, the memory and what was asked for."""

from collections import namedtuple

from colibri.errors import ColibriError, between

MAX_CONTEXT = 1 << 30
DEFAULT_CONTEXT = 4096  # of a model that has no limit of its own
LEAST_CONTEXT = 512     # a run's, whatever memory is said to be free
STEP = 64               # what a context that memory decides is a multiple of


class Context(namedtuple("Context", "positions wanted own decided_by")):
    """The positions of a session.

    wanted:     the positions that it would have if there were memory for them
    own:        the model's, 0 for a model that has no limit
    decided_by: "model", "default" of a model without a limit, "option" --context, "memory", or "stack", which has none
    """

    def text(self):
        """Returns what a run's table says of it."""
        return {"model": f"{self.positions} positions, the model's own",
                "default": f"{self.positions} positions, of a model without a limit of its own; --context",
                "option": f"{self.positions} positions, --context",
                "memory": f"{self.positions} of {self.wanted} positions, what memory allows; --context",
                }[self.decided_by]

    def rule(self, wanted, path):
        """Returns how many tokens fit, by which limit, and what to do for `wanted`: the end of an error."""
        if self.decided_by == "stack":
            return f"{self.positions} of a bare stack of MoE layers; use fewer"
        if self.positions == self.own:
            return f"{self.positions}, the model's own positions (max_positions of {path}); use fewer"
        has = f"the model has {self.own} positions" if self.own else "the model has no limit"
        if self.decided_by == "memory":
            return f"{self.positions}, what memory holds ({has}); use fewer, or lower --batch-size"
        raised = min(wanted, self.own or MAX_CONTEXT)
        return f"{self.positions}, the context of this run ({has}); use fewer, or raise it with --context {raised}"


def choose(checkpoint, asked, num_slots, needed, available):
    """Returns the Context of num_slots sessions.

    asked:     positions, or None for as many as the model has and memory holds
    needed:    function of the positions: bytes of weights, caches and workspaces
    available: bytes of memory for them
    """
    own = int(checkpoint.header["max_positions"])
    if not checkpoint.header["num_heads"]:
        if asked is not None:
            raise ColibriError("--context", asked, "only for a model with attention",
                               f"{checkpoint.path} is a bare stack of MoE layers, leave it out")
        return Context(DEFAULT_CONTEXT, DEFAULT_CONTEXT, 0, "stack")
    between("context", asked, None, 1, MAX_CONTEXT)
    if asked and own and asked > own:
        raise ColibriError("--context", asked,
                           f"at most {own}, the model's own positions (max_positions of {checkpoint.path})",
                           "use fewer")
    wanted = asked or own or DEFAULT_CONTEXT
    if wanted <= LEAST_CONTEXT or needed(wanted) <= available:
        return Context(wanted, wanted, own, "option" if asked else "model" if own else "default")
    fits = max(_most(needed, available, wanted), LEAST_CONTEXT)
    if asked:
        raise ColibriError("--context", asked,
                           f"at most {fits}, what memory holds with {num_slots} sessions at once: "
                           f"{needed(asked) / 2**30:.2f} GiB needed, weights included, "
                           f"{max(available, 0) / 2**30:.2f} GiB free",
                           "use fewer, or lower --batch-size")
    return Context(fits, wanted, own, "memory")


def _most(needed, available, limit):
    """Returns the largest multiple of STEP below limit for which needed() is available, or 0."""
    low, high = 0, -(-limit // STEP)  # in steps: the answer is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle * STEP) <= available else (low, middle)
    return low * STEP
