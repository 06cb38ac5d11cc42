"""Names that jax gives the operations of a compiled program: module paths and phases.

An operation is named by the functions and scopes around it, such as
"jit(step)/transpose(jvp(Model))/blocks_0/mlp/dot_general".
"""

import re

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

_WRAPPED = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint)\((.*)\)$")
_CALL = re.compile(r"^(?:jit|pjit|pmap|xla_pmap|shmap|custom_\w+)\(.*\)$")
_STRUCTURE = frozenset(
    "while body cond closed_call shard_map checkpoint rematted_computation remat "
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr branch_0_fun branch_1_fun "
    "jit pjit eval_jaxpr".split()
)


def phase(op_name: str, has_backward: bool) -> str:
    """The part of a step that an operation belongs to: forward, backward or update.

    "" for what the compiler adds without a name.

    Args:
      op_name: its name.
      has_backward: whether the program has a backward pass; all is forward without one.
    """
    if not op_name:
        return ""
    if "transpose(" in op_name or "rematted_computation" in op_name:
        return BACKWARD
    return FORWARD if "jvp(" in op_name or not has_backward else UPDATE


def module_path(op_name: str) -> str:
    """The scopes around an operation, such as "Model/blocks_0/mlp"; "" for none."""
    scopes = []
    for part in op_name.split(";")[0].split("/")[:-1]:
        while wrapped := _WRAPPED.match(part):
            part = wrapped.group(1)
        if part and part not in _STRUCTURE and not _CALL.match(part):
            scopes.append(part)
    return "/".join(scopes) if all(s.count("(") == s.count(")") for s in scopes) else ""
