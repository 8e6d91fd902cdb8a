"""Ranks that are not there, for layers that several ranks share."""

from __future__ import annotations


class Part:
    """One of several ranks whose messages say nothing."""

    local_rank = 0

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.sent = []

    def start_exchange(self, sends, receives, name=""):
        self.sent.append((name, {r: a.shape for r, a in sends.items()}, {r: a.shape for r, a in receives.items()}))
        return self

    def start_all_reduce(self, array, span=None, name=""):
        return self

    def wait(self):
        pass
