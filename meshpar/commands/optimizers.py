"""Optimizers of optax by name, from which `verify --optimizers` draws.

Each treats tensors in a way of its own: element by element, by norms of tensors or of
the whole tree, by matrices, by the number of dims, by the path of a layer.
"""

import re
from typing import Any

import jax
import optax
from flax.traverse_util import path_aware_map
from optax import contrib


def _matrices(params: Any) -> Any:
    """True for tensors with two dims or more."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def layer_of(path: tuple, _: Any = None) -> str:
    """The number of a parameter's layer, the first in its path, or "none"."""
    found = re.search(r"\d+", "/".join(map(str, path)))
    return found.group() if found else "none"


def _frozen(params: Any) -> Any:
    """Labels of the first two layers, and of all other parameters."""

    def label(path: tuple, x: Any) -> str:
        return "frozen" if layer_of(path, x) in ("0", "1") else "trained"

    return path_aware_map(label, params)


def _even(params: Any) -> Any:
    """Labels of layers of even and of odd number."""

    def label(path: tuple, x: Any) -> str:
        layer = layer_of(path, x)
        return "odd" if layer != "none" and int(layer) % 2 else "even"

    return path_aware_map(label, params)


def _clipped(clip: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(clip, optax.sgd(0.05, momentum=0.9))


OPTIMIZERS: dict[str, optax.GradientTransformation | optax.MultiSteps] = {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1.0),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adagrad": optax.adagrad(1e-1),
    "adam": optax.adam(1e-2),
    "adamax": optax.adamax(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "adan": optax.adan(1e-2),
    "ademamix": contrib.ademamix(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "dadapt_adamw": contrib.dadapt_adamw(1.0),
    "dog": contrib.dog(1.0),
    "fromage": optax.fromage(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "lbfgs": optax.lbfgs(1e-2, linesearch=None),
    "lion": optax.lion(1e-3),
    "momo_adam": contrib.momo_adam(1e-2),
    "muon": contrib.muon(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-1, key=0),
    "novograd": optax.novograd(1e-2),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(1e-2),
    "polyak_sgd": optax.polyak_sgd(max_learning_rate=0.1),
    "prodigy": contrib.prodigy(1.0),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "rprop": optax.rprop(1e-2),
    "schedule_free": contrib.schedule_free_adamw(1e-2),
    "sgd": optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "sharpness-aware": contrib.sam(optax.sgd(0.05), contrib.normalize(), sync_period=2),
    "sign_sgd": optax.sign_sgd(1e-3),
    "sm3": optax.sm3(1e-1),
    "yogi": optax.yogi(1e-2),
    "adaptive clipping": _clipped(optax.adaptive_grad_clip(0.01)),
    "centralized gradients": _clipped(optax.centralize()),
    "clipping by block": _clipped(optax.clip_by_block_rms(0.01)),
    "clipping by norm": _clipped(optax.clip_by_global_norm(0.1)),
    "decay of matrices alone": optax.adamw(1e-2, weight_decay=1.0, mask=_matrices),
    "finite alone": optax.apply_if_finite(optax.adam(1e-2), 3),
    "first layers frozen": optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, _frozen
    ),
    "injected rate": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 3)
    ),
    "odd layers by muon": optax.multi_transform(
        {"even": optax.adam(1e-2), "odd": contrib.muon(1e-2)}, _even
    ),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "several steps of muon": optax.MultiSteps(contrib.muon(1e-2), 2),
}
"""Optimizers by name."""
