"""Rules of a step as a call: what it waits for, and why it compiles again."""

import re
from collections.abc import Iterator

from meshpar.checker.facts import Facts, op_name
from meshpar.checker.finding import CALL, Finding
from meshpar.checker.flow import Value
from meshpar.checker.leaves import Leaf
from meshpar.checker.lines import definition, made_line
from meshpar.checker.op_names import module_path
from meshpar.contracts.hlo_text import Instruction, type_bytes
from meshpar.contracts.host_transfers import host_bytes

_HOST = ("infeed", "outfeed", "send", "recv")
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback[^"]*"')


def host_transfers(facts: Facts) -> Iterator[Finding]:
    """Exchanges with the host inside the step: callbacks, prints, host memory."""
    for name, scope in facts.module.computations.items():
        for x in scope.values():
            size = _host_bytes(facts, Value(name, x.name), x)
            if size is None:
                continue
            callback = x.opcode == "custom-call" or x.opcode in _HOST
            what = "calls the host" if callback else "copies to or from host memory"
            yield Finding(
                f"the step {what} ({_primitive(x)})",
                "take jax.debug.print, io_callback and device_get out of the step, or "
                "return the value and read it outside, some steps later"
                if callback
                else "keep the array on the device, or move it beside compute",
                size,
                CALL,
                line=facts.line(x),
                path=module_path(op_name(x)),
            )


def _host_bytes(facts: Facts, value: Value, x: Instruction) -> int | None:
    """Bytes that an instruction exchanges with the host; None for all others."""
    if x.opcode == "custom-call" and _CALLBACK.search(x.line):
        scope = facts.module.computations[value.computation]
        sent = sum(type_bytes(scope[o].type) for o in x.operands if o in scope)
        return sent + type_bytes(x.type)
    if x.opcode in _HOST and "_xla_megascale" not in x.line:
        to_host = "is_host_transfer=true" in x.line or x.opcode.endswith("feed")
        return type_bytes(x.type) if to_host else None
    return sum(host_bytes(x)) or None


def _primitive(x: Instruction) -> str:
    return op_name(x).rpartition("/")[2] or x.opcode


def recompilation(facts: Facts) -> Iterator[Finding]:
    """Arguments that come back with another type, so that the next call compiles."""
    found: dict[tuple[str, str], list[Leaf]] = {}
    for leaf, result in facts.returned:
        if change := "; ".join(_changes(leaf, result)):
            same_type = (leaf.shape, leaf.dtype) == (result.shape, result.dtype)
            # Shardings of results are options of jax.jit, or its own choice.
            of_call = same_type and leaf.weak == result.weak
            line = definition(facts) if of_call else made_line(facts, result)
            found.setdefault((change, line), []).append(leaf)
    for (change, line), leaves in found.items():
        more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        yield Finding(
            f"{leaves[0].name}{more}: {change}: the second call compiles again",
            "return it as it came: jnp.asarray(x, dtype) before the first call, "
            "out_shardings= with the shardings of the arguments",
            of=CALL,
            line=line,
        )


def _changes(leaf: Leaf, result: Leaf) -> Iterator[str]:
    """Differences of types between an argument and its next value, in words."""
    if leaf.shape != result.shape:
        yield f"shape {list(leaf.shape)} comes back as {list(result.shape)}"
    if leaf.dtype != result.dtype:
        yield f"{leaf.dtype} comes back as {result.dtype}"
    elif None not in (leaf.weak, result.weak) and leaf.weak != result.weak:
        before, after = ("weak ", "") if leaf.weak else ("", "weak ")
        yield f"{before}{leaf.dtype} comes back as {after}{leaf.dtype}"
    if None not in (leaf.dims, result.dims) and _split(leaf) != _split(result):
        yield f"P{leaf.dims} comes back as P{result.dims}"


def _split(leaf: Leaf) -> tuple | None:
    return leaf.dims if leaf.shape else None
