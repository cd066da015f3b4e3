"""Variables of a kernel's loops that Triton does not carry from one iteration to the next.

Triton visits the body of a loop once to find the variables that it must carry: those with another value afterwards. A
variable that is assigned a value which it happens to have already looks unchanged, and keeps its first value for ever:

    b = a
    for _ in range(n):
        a = b  # the value that a has, in the first iteration
        b = f(b)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

ASSIGNED: list[set[tuple[int, str]]] = []
"""Of each loop that is being visited: the code generator and name of what is assigned in it."""


@contextlib.contextmanager
def not_carried() -> Iterator[list[str]]:
    """Collect the variables that are lost in kernels compiled meanwhile, as "NAME in line LINE of the kernel".

    Kernels that Triton finds in its cache were compiled before. Nothing is collected where this Triton has no
    `_find_carries` (before 3.5).
    """
    from triton.compiler import code_generator

    generator: Any = code_generator.CodeGenerator
    find, assign, lost = getattr(generator, "_find_carries", None), generator.set_value, []
    if find is None:
        yield lost
        return

    def set_value(self: Any, name: str, value: Any) -> None:
        for names in ASSIGNED:
            names.add((id(self), name))
        assign(self, name, value)

    def find_carries(self: Any, node: Any, before: dict[str, Any], *rest: Any, **options: Any) -> Any:
        ASSIGNED.append(set())
        try:
            found = find(self, node, before, *rest, **options)
        finally:
            assigned = ASSIGNED.pop()
        counter = getattr(getattr(node, "target", None), "id", None)
        for owner, name in sorted(assigned):
            is_value = owner == id(self) and name in before and code_generator._is_triton_value(before[name])
            if is_value and name not in found[0] and name != counter:
                lost.append(f"{name} in line {node.lineno} of {self.function_name}")
        return found

    generator._find_carries, generator.set_value = find_carries, set_value
    try:
        yield lost
    finally:
        generator._find_carries, generator.set_value = find, assign
