"""The simulated engine's KV cache: who holds how many blocks, and which of them another request may reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass(slots=True)
class Lease:
    """The KV blocks that one request holds: ``blocks`` in all, the first ``len(content)`` of them full.

    ``content`` has the hash of each full block, None where it is a duplicate that nobody else will find.
    """

    blocks: int = 0
    content: list[Hashable | None] = field(default_factory=list)


class BlockPool:
    """The KV cache's blocks: how many are free, which hold content that another request may reuse, which goes first.

    A block that is full and whose content is known (by a hash that covers everything before it) may be shared. A free
    block keeps its content until it is needed for something else: blocks without content go first, then the least
    recently freed; of one request, its last blocks before its first. Without ``caching`` none outlives its request.
    """

    def __init__(self, blocks: int, block_tokens: int, *, caching: bool) -> None:
        self.block_tokens = block_tokens
        self.caching = caching
        self._blank = blocks  # free, without content
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  # free, with content; least recently freed first
        self._users: dict[Hashable, int] = {}  # in use, with content

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._blank + len(self._idle)

    def count(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_tokens)

    def find(self, hashes: Sequence[Hashable], most_tokens: int) -> int:
        """How many of the leading blocks are there already, of at most ``most_tokens`` tokens."""
        leading = hashes[: most_tokens // self.block_tokens] if self.caching else ()
        return sum(1 for _ in takewhile(lambda content: content in self._users or content in self._idle, leading))

    def fits(self, hashes: Sequence[Hashable], hits: int, tokens: int) -> bool:
        """Whether a newcomer of ``tokens`` tokens whose first ``hits`` blocks are there already can be taken in."""
        revived = sum(1 for content in hashes[:hits] if content in self._idle)
        return self.count(tokens) - hits <= self.free - revived

    def take(self, hashes: Sequence[Hashable], hits: int) -> Lease:
        """A new lease that shares the first ``hits`` blocks."""
        for content in hashes[:hits]:
            if content in self._idle:
                del self._idle[content]
                self._users[content] = 0
            self._users[content] += 1
        return Lease(hits, list(hashes[:hits]))

    def extend(self, lease: Lease, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all. False, and nothing changes, when there are not enough blocks."""
        missing = max(0, self.count(tokens) - lease.blocks)
        if missing > self.free:
            return False
        lease.blocks += missing
        blank = min(missing, self._blank)
        self._blank -= blank
        for _ in range(missing - blank):
            self._idle.popitem(last=False)
        return True

    def fill(self, lease: Lease, hashes: Sequence[Hashable]) -> None:
        """Note the content of the blocks that are full now; ``hashes`` names them from the first on."""
        for content in hashes[len(lease.content) :]:
            if content in self._users or content in self._idle:
                lease.content.append(None)
            else:
                self._users[content] = 1
                lease.content.append(content)

    def release(self, lease: Lease) -> None:
        """Give all blocks back; what they hold can still be found until they are needed."""
        self._blank += lease.blocks - len(lease.content)
        for content in reversed(lease.content):
            if content is None:
                self._blank += 1
                continue
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content]
                self._idle[content] = None
        lease.blocks = 0
        lease.content.clear()
