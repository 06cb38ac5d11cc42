"""PipeDream: versions of weights, replicated stages and the partitioner."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments.gallery import digits, elastic, pipedream_loops
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.gallery.pipedream_profiles import resnet50, vgg16
from meshpar.methods.pipedream import order, partitioner
from meshpar.methods.pipedream.partitioner import LayerProfile
from meshpar.methods.pipedream.training import PipeDream, Trained

_STAGES, _WIDTH, _ROWS, _MINIBATCHES, _RATE = 4, 6, 8, 24, 0.3
_EQUAL = 1e-6
_MACHINES, _BANDWIDTH, _FLOPS = 16, 10e9 / 8, (10e12, 14e12, 20e12)
"""Cluster A of the paper: 16 V100, 10 Gbit/s; FLOP/s that each may reach."""

_DIGIT_ROWS, _STEPS = 16, 300
_RATES = tuple(2.0 ** np.arange(-6, 2))
_PLAIN, _LOST = "plain SGD", 0.05


def _stage(w, x):
    return jnp.tanh(x @ w)


def _loss(y, batch):
    return jnp.square(y - batch["y"]).mean()


@functools.cache
def _problem() -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
    draws = np.random.default_rng(0)
    shape = (_ROWS, _WIDTH)
    return [draws.normal(size=(_WIDTH, _WIDTH)) / 2 for _ in range(_STAGES)], [
        {name: draws.normal(size=shape) for name in "xy"} for _ in range(_MINIBATCHES)
    ]


def trained(
    policy: str, replicas: tuple[int, ...] = (), accumulate: int = 0
) -> Trained:
    """Trains four matrices in float64 on devices of their own, with plain SGD."""
    start, minibatches = _problem()
    with jax.enable_x64(True):
        sgd = _sgd(_RATE)
        pipeline = PipeDream(
            [_stage] * _STAGES,
            _loss,
            sgd,
            weights=policy,
            replicas=replicas,
            accumulate=accumulate,
        )
        return pipeline.train(start, minibatches)


@functools.cache
def _sgd(rate: float) -> optax.GradientTransformation:
    return optax.sgd(rate)


def _off(found: list, wanted: list[np.ndarray], start: list[np.ndarray]) -> float:
    """Largest error of a matrix's way, relative to its length."""
    return max(
        float(np.linalg.norm(np.asarray(f) - w) / np.linalg.norm(w - s))
        for f, w, s in zip(found, wanted, start, strict=True)
    )


RECURRENCES = {
    "stashed": (
        "w(t+1) = w(t) - lr grad f(w1(t-n+1), w2(t-n+2), ..., wn(t))",
        lambda s, t: max(0, t - (_STAGES - 1 - s)),
        {},
    ),
    "vertical_sync": (
        "w(t+1) = w(t) - lr grad f(w1(t-n+1), w2(t-n+1), ..., wn(t-n+1))",
        lambda s, t: max(0, t - (_STAGES - 1)),
        {},
    ),
    "double_buffered": (
        "2BW: W(t+1) = W(t) - lr grad f(W(t-1))",
        lambda s, t: max(0, t // _STAGES - 1),
        {"accumulate": _STAGES},
    ),
}
"""{policy: (the paper's recurrence, the version of a stage and minibatch, options)}."""


def recurrence_claims(replicated: bool = True) -> list[Claim]:
    """Whether each policy follows its paper's recurrence, in a loop of numpy."""
    start, minibatches = _problem()
    claims, held = [], {}
    for policy, (paper, age, options) in RECURRENCES.items():
        found = trained(policy, **options)
        held[policy] = tuple(found.held)
        each = [options.get("accumulate", 1)] * _STAGES
        loop = pipedream_loops.delayed(start, minibatches, _RATE, age, each)
        error = _off(found.params, loop, start)
        text = f"{policy}: {_MINIBATCHES} minibatches equal a loop of numpy, to 1e-6"
        claims.append(Claim(text, paper, f"{error:.1e} off", error < _EQUAL))
    wanted = {
        "stashed": tuple(range(_STAGES, 0, -1)),
        "vertical_sync": (_STAGES,) * _STAGES,
        "double_buffered": (2,) * _STAGES,
    }
    texts = (f"{held[policy]} ({policy})" for policy in wanted)
    claims.append(
        Claim(
            f"most versions that {_STAGES} stages held at once",
            "stashing: one per minibatch in flight, 4, 3, 2, 1; 2BW: two",
            ", ".join(texts),
            held == wanted,
        )
    )
    return [*claims, replicated_claim()] if replicated else claims


def replicated_claim() -> Claim:
    """Whether replicas of a stage train as one on the mean of their minibatches."""
    start, minibatches = _problem()
    found = trained("stashed", (2, 1, 2, 1))
    # Three, four, two and one round are in flight, of two, one, two, one minibatches.
    each, behind = (2, 1, 2, 1), (2, 3, 1, 0)
    loop = pipedream_loops.delayed(
        start, minibatches, _RATE, lambda s, t: max(0, t // each[s] - behind[s]), each
    )
    error = _off(found.params, loop, start)
    return Claim(
        "stages of 2, 1, 2 and 1 workers equal a loop of numpy, to 1e-6",
        "round robin over replicas, whose gradients are averaged (section 3.2)",
        f"{error:.1e} off",
        error < _EQUAL,
    )


class _Net(nnx.Module):
    """Matrices of four layers, for `meshpar.lower`."""

    def __init__(self, rngs: nnx.Rngs):
        def layer(rngs: nnx.Rngs) -> nnx.Linear:
            dims = {"out_sharding": ("embed", "mlp")}
            size = _WIDTH, _WIDTH
            return nnx.Linear(*size, use_bias=False, kernel_metadata=dims, rngs=rngs)

        stacked = nnx.vmap(layer, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = stacked(rngs.split(_STAGES))


def spmd_claim() -> Claim:
    """Whether `schedule=pipedream` of the library follows stashing's recurrence."""
    start, minibatches = _problem()
    start = [np.float64(np.float32(w)) for w in start]
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=lambda layer, x: jnp.tanh(layer(x)),
        head_loss=lambda net, x, batch: jnp.square(x - batch["y"]).mean(),
    )
    # Microbatch m of a batch holds the rows m, m + M, m + 2 M, ...
    rows = {n: np.stack([b[n] for b in minibatches], axis=1) for n in "xy"}
    batch = {n: x.reshape(-1, _WIDTH).astype(np.float32) for n, x in rows.items()}
    program = meshpar.lower(
        meshpar.from_nnx(_Net, stack),
        _sgd(_RATE),
        f"pipe={_STAGES},microbatches={_MINIBATCHES},schedule=pipedream",
        batch,
        devices=jax.devices()[:_STAGES],
    )
    (path,) = program.model.params
    state = program.init(0, {path: np.float32(start)})
    state, _ = program.step(state, batch)
    found = list(np.asarray(state.params[path]))
    loop = pipedream_loops.delayed(
        start,
        minibatches,
        _RATE,
        lambda s, t: max(0, t - 2 * (_STAGES - 1 - s)),
        (1,) * _STAGES,
    )
    error = max(
        float(np.linalg.norm(f - w) / np.linalg.norm(w))
        for f, w in zip(found, loop, strict=True)
    )
    return Claim(
        "schedule=pipedream, one compiled program on 4 devices, in float32, to 1e-6",
        "2(n-s) updates behind on stage s, as F and B share a tick",
        f"{error:.1e} off",
        error < _EQUAL,
    )


def naive_claim() -> Claim:
    """How far a pipeline without stashing is from what it means to compute."""
    start, minibatches = _problem()
    found = trained("newest")
    _, age, _ = RECURRENCES["stashed"]
    loop = pipedream_loops.delayed(start, minibatches, _RATE, age, (1,) * _STAGES)
    error = _off(found.params, loop, start)
    return Claim(
        "without stashing the recurrence is missed, as the passes' weights differ",
        "naive pipelining: incorrect gradients (section 3.3)",
        f"{error:.3f} off",
        error > 0.01,
    )


def partition_claims(cases: int) -> list[Claim]:
    """Whether the dynamic program finds the best of all partitions, and keeps pace."""
    draws, worst = np.random.default_rng(0), 0.0
    for _ in range(cases):
        layers = [LayerProfile(*draws.uniform(0, [1, 1, 3])) for _ in range(5)]
        machines = int(draws.integers(2, 6))
        found = partitioner.partition(layers, machines, 2.0)
        best = pipedream_loops.best_seconds(layers, machines, 2.0)
        worst = max(worst, abs(found.seconds / best - 1))
    return [
        Claim(
            f"the partitioner finds the best of all partitions, {cases} profiles",
            "a dynamic program finds the optimum (section 3.1)",
            f"at most {worst:.0e} off",
            bool(worst < 1e-9),
        ),
        pace_claim(cases),
    ]


def pace_claim(cases: int) -> Claim:
    """Whether workers in the order of 1F1B-RR keep the slowest stage at work."""
    draws, slower = np.random.default_rng(1), 0.0
    for case in range(cases):
        straight, two = [1] * int(draws.integers(2, 6)), draws.integers(1, 5, 2)
        replicas = straight if case % 2 else two.tolist()
        slower = max(slower, _paced(replicas, draws.uniform(0.9, 1.0, len(replicas))))
    between = _paced([1, 2, 1], np.ones(3))
    return Claim(
        "events of the workers in 1F1B-RR: the slowest stage sets the pace, straight "
        "and of two replicated stages",
        "no pipeline stalls in the steady state (section 3.2)",
        f"at most {slower:.1%} slower; three stages of 1, 2 and 1 stall: {between:.0%}",
        bool(slower < 0.01),
    )


def _paced(replicas: list[int], balance: np.ndarray) -> float:
    """How much longer a minibatch takes than on the slowest stage alone."""
    seconds = [r * float(x) for r, x in zip(replicas, balance, strict=True)]
    num = 60 * math.lcm(*replicas)
    took = pipedream_loops.period(order.orders(replicas, num), seconds, num)
    return took / float(balance.max()) - 1


def _named(found: partitioner.Partition) -> str:
    return "-".join(map(str, found.replicas))


def configuration_claims() -> list[Claim]:
    """The configurations of the paper's table 1 on its cluster A."""
    claims = []
    for name, make, paper in (("VGG-16", vgg16, "15-1"), ("ResNet-50", resnet50, "16")):
        names = [
            _named(partitioner.partition(make(flops), _MACHINES, _BANDWIDTH))
            for flops in _FLOPS
        ]
        speeds = ", ".join(f"{x / 1e12:.0f}" for x in _FLOPS)
        claims.append(
            Claim(
                f"{name} on 16 machines at 10 Gbit/s, of {speeds} TFLOP/s each",
                f"{paper} (table 1)",
                ", ".join(names),
                set(names) == {paper},
            )
        )
    return claims


def _layers() -> list:
    def hidden(w, x):
        return jnp.maximum(x @ w, 0)

    return [hidden, hidden, hidden, lambda w, x: x @ w]


_DIGIT_STAGES = _layers()


def _cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def _whole(weights, x):
    for stage, w in zip(_DIGIT_STAGES, weights, strict=True):
        x = stage(w, x)
    return x


def digits_loss(policy: str, rate: float, seed: int) -> float:
    """Held-out loss of digits after a run; one stage alone is plain SGD."""
    draws = np.random.default_rng(seed)
    sizes = (digits.PIXELS, 64, 64, 64, digits.CLASSES)
    params = [
        (draws.normal(size=size) * (2 / size[0]) ** 0.5).astype(np.float32)
        for size in itertools.pairwise(sizes)
    ]
    stages, weights = list(_DIGIT_STAGES), policy
    if policy == _PLAIN:
        stages, weights, params = [_whole], "stashed", [tuple(params)]
    devices = jax.devices()[:1] * len(stages)
    sgd, rows = _sgd(rate), list(digits.batches(_STEPS, _DIGIT_ROWS, seed))
    pipeline = PipeDream(stages, _cross_entropy, sgd, weights=weights, devices=devices)
    found = pipeline.train(params, rows).params
    held_out = digits.load()[1]
    logits = _whole(found[0] if policy == _PLAIN else found, held_out.x)
    return float(_cross_entropy(logits, {"y": held_out.y}))


def learning(seeds: tuple[int, ...]) -> dict[str, elastic.Tuned]:
    """{policy: mean loss with its best rate, of a grid}."""
    return {
        policy: elastic.tuned(
            lambda rate, policy=policy: float(
                np.mean([digits_loss(policy, rate, seed) for seed in seeds])
            ),
            _RATES,
        )
        for policy in (_PLAIN, "stashed", "vertical_sync")
    }


def learning_claims(found: dict[str, elastic.Tuned]) -> list[Claim]:
    """Whether stashed weights learn as plain SGD does; each rate is tuned."""
    losses = ", ".join(f"{x.loss:.3f} ({name})" for name, x in found.items())
    rates = ", ".join(f"{x.rate:.3f} ({name})" for name, x in found.items())
    return [
        Claim(
            f"held-out loss of digits after {_STEPS} minibatches, {_LOST} above plain",
            "as many epochs as data parallelism to the same accuracy (section 5.2)",
            losses,
            found["stashed"].loss - found[_PLAIN].loss < _LOST,
        ),
        Claim(
            "the best rate of each is inside its grid",
            "",
            rates,
            all(x.inside for x in found.values()),
        ),
    ]


def _seconds(machines: int) -> tuple[float, float]:
    """VGG-16: seconds per minibatch (of the partitioner, of data parallelism)."""
    layers = vgg16(_FLOPS[1])
    found = partitioner.partition(layers, machines, _BANDWIDTH).seconds
    together = LayerProfile(*map(sum, zip(*layers, strict=True)))
    alone = partitioner.partition([together], machines, _BANDWIDTH).seconds
    return found, alone


def _run(setting: Setting) -> Result:
    setting.progress("recurrences", 0.0)
    claims = recurrence_claims()
    claims += [naive_claim(), spmd_claim()]
    setting.progress("partitions", 0.4)
    claims += partition_claims(10 if setting.quick else 100)
    claims += configuration_claims()
    learned = {}
    if not setting.quick:
        setting.progress("learns digits", 0.5)
        learned = learning(setting.seeds[:2])
        claims += learning_claims(learned)
    ages = {
        policy: [t - age(s, t) for s in range(_STAGES) for t in (_MINIBATCHES - 1,)]
        for policy, (_, age, _) in RECURRENCES.items()
        if policy != "double_buffered"
    }
    ages["double_buffered"] = [
        _MINIBATCHES
        - 1
        - _STAGES * RECURRENCES["double_buffered"][1](s, _MINIBATCHES - 1)
        for s in range(_STAGES)
    ]
    machines = (1, 2, 4, 8, 12, 16)
    speeds = {m: [64 / seconds for seconds in _seconds(m)] for m in machines}
    plans = {
        m: _named(partitioner.partition(vgg16(_FLOPS[1]), m, _BANDWIDTH))
        for m in machines
    }

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        for policy, behind in ages.items():
            left.plot(range(1, _STAGES + 1), behind, "o-", label=policy)
        left.set(xlabel="stage", ylabel="minibatches that the weights lack")
        left.set(ylim=(-0.3, 9), xticks=range(1, _STAGES + 1))
        left.legend(fontsize=8)
        for name, index in (("PipeDream", 0), ("data parallelism", 1)):
            values = [speeds[m][index] for m in machines]
            right.plot(machines, values, "o-", label=name)
        right.set(xlabel="machines, 10 Gbit/s", ylabel="VGG-16 images/s", ylim=0)
        right.legend(fontsize=8)

    rows = [
        (str(m), plans[m], *(f"{speed:.0f}" for speed in speeds[m])) for m in machines
    ]
    return Result(
        ("machines", "stages of VGG-16", "images/s", "data parallel"),
        tuple(rows),
        tuple(claims),
        {
            "images_per_second": speeds,
            "minibatches_behind": ages,
            "digits": {name: x._asdict() for name, x in learned.items()},
        },
        draw,
    )


PAPER = Paper(
    name="pipedream",
    title="PipeDream: which weights a minibatch meets, and where a pipeline is cut",
    source="Narayanan et al., SOSP 2019, sections 3.1 to 3.3, table 1; Narayanan et "
    "al., ICML 2021, arXiv:2006.09503, section 3.1 (2BW)",
    shows="minibatches that the weights of each stage lack, and images per second of "
    "VGG-16 as the partitioner predicts them",
    run=_run,
)
