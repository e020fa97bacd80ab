"""How many instruction bundles a TPU kernel takes, from what the compiler writes about it (libtpu, `--xla_jf_dump_to`).

Each line of a listing is a bundle, which takes a cycle: its address, "LB" where a loop begins, and a ">" for each loop
that it is in. Lines without one are the waits of branches.
"""

import dataclasses
import re
from pathlib import Path

LINE = re.compile(r"^\s*0x[0-9a-f]+\s*(LB|PF)?\s*: (>*) ?\{")


@dataclasses.dataclass(kw_only=True)
class Loop:
    """A loop: stretches of bundles between branches, and the loops in it, in the order of their code."""

    depth: int
    parts: "list[int | Loop]" = dataclasses.field(default_factory=list)

    @property
    def loops(self) -> "list[Loop]":
        return [part for part in self.parts if isinstance(part, Loop)]

    @property
    def own(self) -> int:
        """Bundles outside its inner loops, all branches taken."""
        return sum(part for part in self.parts if isinstance(part, int))

    @property
    def bundles(self) -> int:
        """All, each inner loop once."""
        return sum(part if isinstance(part, int) else part.bundles for part in self.parts)


def read(folder: Path, kernel: str) -> Loop:
    """The kernel as a loop that is run once.

    Raises:
        FileNotFoundError: no kernel of this name was compiled with its listing in this folder.
    """
    for file in folder.glob(f"*-{kernel}*-final_bundles.txt"):
        if "schedule-analysis" not in file.name:
            return parse(file.read_text(encoding="utf-8"))
    raise FileNotFoundError(f"no listing of {kernel} in {folder}")


def parse(listing: str) -> Loop:
    root = Loop(depth=0, parts=[0])
    stack = [root]
    for line in listing.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        label, depth = match[1], len(match[2])
        if depth > 0:  # else a wait, where the loops around it are not named
            while stack[-1].depth > depth or (label == "LB" and stack[-1].depth == depth):
                stack.pop()
            if label == "LB":
                stack.append(Loop(depth=depth, parts=[0]))
                stack[-2].parts.append(stack[-1])
        loop = stack[-1]
        if label == "PF" or not isinstance(loop.parts[-1], int):
            loop.parts.append(0)
        last = loop.parts[-1]
        assert isinstance(last, int)
        loop.parts[-1] = last + 1
    return root
