"""Refusals of a layout with a model, a lowering, a schedule or a mode."""

import dataclasses
from collections.abc import Iterable

from meshpar.layouts.axes import (
    AXES,
    DATA,
    FSDP,
    PIPE,
    REPLICA,
    TOKEN_AXES,
)
from meshpar.layouts.mixes import reason_depth
from meshpar.layouts.offload import NONE, OPTIMIZER
from meshpar.layouts.param import STACKED_DIM
from meshpar.layouts.pipeline_options import UNUSED
from meshpar.layouts.refusals.combination import AUTO, JIT, SHARD_MAP, Combination
from meshpar.layouts.refusals.of_layouts import OF_LAYOUTS
from meshpar.layouts.refusals.refusal import (
    ROW_LAYERS,
    Changes,
    Refusal,
    as_data,
    both,
    leaves_out,
    left_out,
    policies_by_layer,
    row_layers,
    sizes,
)
from meshpar.layouts.token_order import CONTIGUOUS

# A layout beside a model, a lowering, a schedule and a mode.

_WITHOUT_LAYERS = frozenset(
    (DATA, FSDP, "zero", "microbatches", "min_shard_size")
    + ("params", "activations", "paths", "allow")
)
"""Fields of layouts that models without layers have under lowering=shard_map."""


def _token_order(c: Combination) -> list[str]:
    """The setting that gives tokens another order than that of their sequence."""
    order = c.layout.context_order
    return c.settings("context_order") if order != CONTIGUOUS else []


def _layer_by_layer(c: Combination) -> list[str]:
    """Settings that move weights or activations of one layer at a time."""
    streams = bool(c.layout.offloaded - {OPTIMIZER})
    return [*c.settings("prefetch"), *row_layers(c), *c.settings("offload") * streams]


def _asks_for_layers(c: Combination) -> list[str]:
    """Fields that a model without layers cannot have."""
    if c.layered:
        return []
    if c.lowering == SHARD_MAP:
        fields = (field.name for field in dataclasses.fields(c.layout))
        return [name for name in fields if name not in _WITHOUT_LAYERS]
    names = [PIPE, "prefetch", "scan_unroll", "offload"]
    names += ["layers"] * bool(row_layers(c)) + ["remat"] * bool(policies_by_layer(c))
    return names + ["context_order"] * bool(_token_order(c))


def _for_no_layers(c: Combination) -> Iterable[Changes]:
    """A layout of as many devices that needs no layers."""
    fields = _asks_for_layers(c)
    yield left_out(c, *fields) | as_data(c, *(set(fields) & set(AXES)))


def _moves_batch(c: Combination) -> list[str]:
    """Names of the activations whose rules move the axes that split the batch."""
    rules = c.layout.activations
    return [n for n, axes in rules if n == "batch" or set(axes) & set(TOKEN_AXES)]


def _splits_stack(c: Combination) -> bool:
    """Whether a rule splits the stack of layers over another axis than `pipe`."""
    return dict(c.layout.params).get(STACKED_DIM, ()) not in ((), (PIPE,))


def _without_rules(c: Combination, kind: str, names: Iterable[str]) -> Changes:
    """The rules of a kind without those of some names."""
    rules, names = getattr(c.layout, kind), set(names)
    return {kind: tuple(rule for rule in rules if rule[0] not in names)}


def _rules(c: Combination, kind: str, names: Iterable[str]) -> str:
    """The rules of some names, as in a layout string."""
    rules = dict(getattr(c.layout, kind))
    return ", ".join(f"{kind}.{n}={'+'.join(rules[n]) or NONE}" for n in names)


def _depth(c: Combination) -> str:
    """A reason why a mix does not name the layers of the model."""
    if not c.layered:
        return ""
    problems = (
        reason_depth(name, getattr(c.layout, name), c.model.depth, c.model.pattern)
        for name in ("remat", "layers")
    )
    return next(filter(None, problems), "")


def _pipeline(c: Combination, trait: str) -> list[str]:
    """The schedule, if its pipeline has a trait."""
    pipeline = c.pipeline
    return [f"schedule={pipeline.schedule}"] if getattr(pipeline, trait, False) else []


_BEYOND_STAGE = "vocab", "save", "tick_loop"


def _asked(c: Combination, *names: str) -> list[str]:
    """Settings of options of pipelines that ask for more than a stage does alone."""
    used = (n for n in names if getattr(c.layout, n) != UNUSED.get(n))
    return c.settings(*used)


def _beyond_stage(c: Combination) -> list[str]:
    """Settings for which a stage needs the others to update its weights."""
    settings = [*sizes(c, FSDP), *_asked(c, *_BEYOND_STAGE)]
    return settings + [f"clip_norm={c.clip_norm}"] * (c.clip_norm is not None)


def _other_pipelines(c: Combination) -> Iterable[Changes]:
    """Schedules and partitions to try in place of one that cannot be."""
    yield left_out(c, "virtual_stages")
    yield {"schedule": "interleaved"}
    yield left_out(c, "partition")
    yield {"schedule": "1f1b", **left_out(c, "virtual_stages", "partition")}


def _is_mode(c: Combination, **traits: bool) -> list[str]:
    """The mode, if it has these traits."""
    mode = c.mode
    has_all = mode and all(getattr(mode, name) == x for name, x in traits.items())
    return [f"mode={mode.name}"] if has_all else []


OF_TRAINING: tuple[Refusal, ...] = (
    *OF_LAYOUTS,
    Refusal(
        f"{PIPE}=N, offload, prefetch, scan_unroll, {ROW_LAYERS}, remat by layer, "
        "context_order; "
        f"under lowering={SHARD_MAP} all but {DATA}, {FSDP}, zero and microbatches",
        "a model without layers",
        lambda c: ", ".join(c.settings(*_asks_for_layers(c))),
        "this needs layers, and the model has no layered form",
        "name its layers by layers=, give from_nnx a meshpar.LayerStack, or leave it "
        "out",
        _for_no_layers,
    ),
    Refusal(
        f"lowering={SHARD_MAP}",
        "a model without layers that changes state by the batch",
        lambda c: (
            f"lowering={SHARD_MAP}, and the model changes {c.model.changed} by the "
            "whole batch"
            if c.lowering == SHARD_MAP and c.model.changed and not c.layered
            else ""
        ),
        "a device sees a part of the batch",
        f"use lowering={JIT}",
    ),
    Refusal(
        "activations.DIM=AXIS of the batch, activations.batch=AXIS",
        f"lowering={SHARD_MAP}",
        lambda c: _rules(c, "activations", _moves_batch(c)),
        "the rule moves the batch axes",
        "leave it out",
        lambda c: [_without_rules(c, "activations", _moves_batch(c))],
        SHARD_MAP,
    ),
    Refusal(
        f"params.{STACKED_DIM}=AXIS",
        f"lowering={SHARD_MAP}",
        lambda c: _rules(c, "params", [STACKED_DIM] * _splits_stack(c)),
        "the rule splits the stack of layers",
        "leave it out",
        lambda c: [_without_rules(c, "params", [STACKED_DIM])],
        SHARD_MAP,
    ),
    Refusal(
        f"{PIPE}=N",
        f"lowering={JIT}",
        lambda c: ", ".join(sizes(c, PIPE) if c.layered else ()),
        "the compiler makes no pipeline",
        f"leave {PIPE} out",
        lambda c: [as_data(c, PIPE)],
        JIT,
    ),
    Refusal(
        "scan_unroll",
        f"lowering={JIT}",
        lambda c: ", ".join(c.settings("scan_unroll") if c.layered else ()),
        f"under lowering={JIT} the model runs its own layers",
        "leave scan_unroll out",
        lambda c: [left_out(c, "scan_unroll")],
        JIT,
    ),
    Refusal(
        f"prefetch, {ROW_LAYERS}, offload of parameters or activations",
        f"lowering={JIT}",
        lambda c: ", ".join(_layer_by_layer(c) if c.layered else ()),
        "this moves weights or activations layer by layer, and under "
        f"lowering={JIT} the compiler runs the layers",
        "leave it out",
        lambda c: [
            left_out(c, "prefetch", "layers")
            | {"offload": OPTIMIZER if OPTIMIZER in c.layout.offloaded else NONE}
        ],
        JIT,
    ),
    Refusal(
        "context_order",
        f"lowering={JIT}",
        lambda c: ", ".join(_token_order(c) if c.layered else ()),
        f"under lowering={JIT} the model sees whole sequences, in their own order",
        "leave context_order out",
        leaves_out("context_order"),
        JIT,
    ),
    Refusal(
        "remat by layer, layers by layer",
        "another number of layers",
        _depth,
        "a mix names every layer of the model",
        "give counts that add up to the layers, or one value for all of them",
        says_all=True,
    ),
    Refusal(
        "schedule, virtual_stages, partition",
        "numbers of stages, microbatches or layers that they do not fit",
        lambda c: c.pipeline.problem if c.pipeline else "",
        "no table of the schedule, or no partition of the layers, fits them",
        "the error says which fit",
        _other_pipelines,
        says_all=True,
    ),
    Refusal(
        f"{PIPE}=N",
        "a model with an evaluation_loss_fn of its own",
        lambda c: (
            ", ".join(sizes(c, PIPE)) if c.layered and not c.model.evaluates else ""
        ),
        "stages evaluate by the layers of the model, and evaluation_loss_fn is another "
        "function",
        f"leave evaluation_loss_fn or {PIPE} out",
        lambda c: [as_data(c, PIPE)],
    ),
    Refusal(
        f"{FSDP}=N, {', '.join(_BEYOND_STAGE)}, clip_norm",
        "schedule=pipedream",
        lambda c: both(_beyond_stage(c), _pipeline(c, "asynchronous")),
        "every stage updates by itself, with whole weights",
        "leave it out, or use schedule=1f1b",
        lambda c: [
            left_out(c, *_BEYOND_STAGE) | as_data(c, FSDP),
            {"schedule": "1f1b"},
        ],
    ),
    Refusal(
        f"{REPLICA}=N",
        "no mode",
        lambda c: "" if c.mode else ", ".join(sizes(c, REPLICA)),
        "it lets replicas differ, and nothing would synchronize them",
        "give mode=LocalSGD(...) (a command: --optimizer_mode=local_sgd), or use "
        f"{DATA} in place of {REPLICA}",
        lambda c: [as_data(c, REPLICA)],
    ),
    Refusal(
        "mode=LocalSGD",
        f"{REPLICA}=1",
        lambda c: both(
            _is_mode(c, has_replicas=True),
            [f"{REPLICA}=1"] if c.layout.replica == 1 else (),
        ),
        "it synchronizes replicas, and the layout has only one",
        f"add {REPLICA}=N, or leave the mode out",
        lambda c: [{REPLICA: c.layout.data, DATA: 1}],
    ),
    Refusal(
        "mode=Islands",
        f"{REPLICA}=N",
        lambda c: both(_is_mode(c, has_replicas=False), sizes(c, REPLICA)),
        "islands and replicas both train apart",
        "use more islands, or mode=LocalSGD(...)",
        lambda c: [as_data(c, REPLICA)],
    ),
    Refusal(
        "mode=LocalSGD",
        f"lowering={AUTO}",
        lambda c: both(
            _is_mode(c, several_programs=True),
            [f"lowering={AUTO}"] if c.lowering == AUTO else (),
        ),
        f"lowering={AUTO} compares two programs of one step, and the mode has several "
        "of each lowering",
        f"use lowering={SHARD_MAP} or {JIT}",
    ),
    Refusal(
        "mode=LocalSGD, mode=Islands",
        "schedule=pipedream",
        lambda c: both(_is_mode(c), _pipeline(c, "asynchronous")),
        "the mode exchanges weights between steps, and with this schedule there is no "
        "point at which all stages have finished a step",
        "use schedule=1f1b",
        lambda c: [{"schedule": "1f1b"}],
    ),
    Refusal(
        "mode=LocalSGD, mode=Islands",
        "virtual_stages, an uneven partition",
        lambda c: both(_is_mode(c), _pipeline(c, "reorders_layers")),
        "that pipeline stores its layers in another order (several chunks per stage, "
        "or an uneven depth), in which the mode cannot exchange weights",
        f"use virtual_stages=1 and a depth that {PIPE} divides",
        lambda c: [
            left_out(c, "partition"),
            {"schedule": "1f1b", **left_out(c, "virtual_stages", "partition")},
        ],
    ),
)
"""What `lower` refuses."""
