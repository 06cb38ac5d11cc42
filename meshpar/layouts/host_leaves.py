"""The tensors of a plan that live in host memory, as `offload=` of its layout says."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax

from meshpar.arrays import parameter_path
from meshpar.layouts.offload import OPTIMIZER, PARAMETERS
from meshpar.layouts.plan import LeafPlan, Plan


def with_host_leaves(plan: Plan, optimizer_state: Any, stack: Collection[str]) -> Plan:
    """The plan with the tensors that `offload=` names in host memory.

    Under "optimizer" they are the optimizer's tensors that belong to parameters, and
    the layers' master weights if the loss computes with copies in another dtype. Under
    "parameters" they are the layers' parameters. Scalars, embedding and head stay on
    the devices.

    Args:
      plan: as `make_plan` makes it.
      optimizer_state: its abstract optimizer state.
      stack: paths of the layers' parameters.
    """
    offloaded = plan.layout.offloaded

    def moves(path: str, leaf: LeafPlan) -> bool:
        has_copy = plan.weights[path].dtype != leaf.dtype
        named = PARAMETERS in offloaded or (OPTIMIZER in offloaded and has_copy)
        return path in stack and named

    parameters = {
        path: dataclasses.replace(leaf, on_host=moves(path, leaf))
        for path, leaf in plan.parameters.items()
    }
    optimizer = plan.optimizer
    if OPTIMIZER in offloaded:
        keys = [k for k, _ in jax.tree_util.tree_flatten_with_path(optimizer_state)[0]]
        optimizer = tuple(
            dataclasses.replace(
                leaf,
                on_host=bool(leaf.shape) and parameter_path(k, parameters) is not None,
            )
            for k, leaf in zip(keys, optimizer, strict=True)
        )
    return dataclasses.replace(plan, parameters=parameters, optimizer=optimizer)
