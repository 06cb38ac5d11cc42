"""Published mistakes of other frameworks, planted in ours: models, optimizers, runs."""

import functools
import importlib
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support import mistakes, regression, tiny_stack
from support.mistakes import UNCHECKED, kinds, kinds_at, mistakes_at, planted, tensors
from support.tiny_models import host, relative_error

import meshpar
from experiments import data
from experiments.data import DataConfig
from experiments.data import batches as data_batches
from meshpar.collectives.varying import sum_varying
from meshpar.errors import MeshparError
from meshpar.explain.verify import verify
from meshpar.layouts.axes import EXPERT, PIPE
from meshpar.local_sgd.exchange import Exchange
from meshpar.lowering import ema, optimizer, shard_map
from meshpar.lowering.frame import Frame
from meshpar.lowering.optimizer import Optimizer
from meshpar.lowering.portable import PortableState
from meshpar.models import model_checks
from meshpar.models.row_check import Checked
from meshpar.ops import vocabulary_slices
from meshpar.pipeline.stage import PipelineStage

pytestmark = pytest.mark.slow

PARTS, STAGES = "data=2,microbatches=2", "pipe=2,microbatches=2"
WORDS, EXPERTS = mistakes.words(), mistakes.words(experts=4)
# Functions of the same names hide these modules.
positions = importlib.import_module("meshpar.ops.context.positions")
mixture = importlib.import_module("meshpar.ops.experts.mixture")


# Models.


def test_positions_counted_on_each_shard():
    def own(_):
        return lambda length: jnp.arange(length, dtype=jnp.int32)

    report = planted(WORDS, "context=2", (positions, "_positions", own))
    assert kinds(report) >= {"loss", "gradient"}


def test_norms_that_are_not_reduced():
    """Each device has the gradient of its part of the sequence."""

    def but_norms(reduce):
        def reduced(grads, shardings):
            kept = {p: x for p, x in grads.items() if "scale" in p}
            return {**reduce(grads, shardings), **kept}

        return reduced

    places = UNCHECKED, (shard_map, "all_reduce_grads", but_norms)
    report = planted(WORDS, "context=2", *places)
    assert tensors(report, "gradient") == {"layers/scale"}


def test_an_embedding_row_owned_twice():
    def twice(rows_of):
        def rows(ids, size):
            return rows_of(ids, size)[0], (ids >= 0) & (ids <= size)

        return rows

    report = planted(WORDS, "tensor=2", (vocabulary_slices, "rows_of", twice))
    assert kinds(report) >= {"loss", "gradient"}


def test_dropout_alike_on_all_shards():
    def alike(shard_key):
        return lambda self, key: key

    noise = mistakes.words(dropout=0.5, second="data=1")
    report = planted(noise, "data=2", (Frame, "shard_key", alike))
    assert kinds(report) >= {"loss", "gradient"}


def test_dropout_of_its_own_on_every_stage():
    def own(key_of):
        def key(self, microbatch):
            key = key_of(self, microbatch)
            return key if key is None else jax.random.fold_in(key, lax.axis_index(PIPE))

        return key

    noise = mistakes.words(dropout=0.5, second="data=1,microbatches=2")
    report = planted(noise, STAGES, (PipelineStage, "_key", own))
    assert kinds(report) >= {"loss", "gradient"}


class BatchMean(nn.Module):
    """Two layers that subtract the mean of the batch."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = mistakes.LinenLayer(name=f"layer_{i}")(x)
        return x


def test_batch_statistics_of_a_shard():
    """Refused; with the check of rows taken out, the numbers show it."""

    def loss(net, batch):
        return jnp.square(net(batch["x"]) - batch["y"][:, None]).mean()

    batch = tiny_stack.batch()
    model = meshpar.from_linen(BatchMean(), loss, batch["x"][:1], layers="layer_*")
    lower = functools.partial(mistakes.on_devices, model, batch=batch)
    assert verify(lower("data=1"), None, [batch]).ok
    options = {"lowering": "shard_map"}
    with pytest.raises(MeshparError, match="rows|batch"):
        lower("data=2", **options)
    unchecked = Checked({}, drawn=None, reads_key=False)
    with mistakes_at((model_checks, "check_losses", lambda _: lambda *_: unchecked)):
        report = verify(lower("data=2", **options), None, [batch])
    assert kinds(report) >= {"loss", "gradient"}


# Mixtures of experts.


def test_gradients_of_routers_doubled():
    def doubled(route):
        def routed(*args, **options):
            found = route(*args, **options)
            weights = 2 * found.weights - lax.stop_gradient(found.weights)
            return found._replace(weights=weights)

        return routed

    report = planted(EXPERTS, "expert=2", (mixture, "route", doubled))
    assert "layers/router" in tensors(report, "gradient")
    assert "loss" not in kinds(report)


def test_outputs_of_experts_without_weights():
    def ones(weighted):
        return lambda self, up, gate, weights: weighted(
            self, up, gate, jnp.ones_like(weights)
        )

    report = planted(EXPERTS, "expert=2", (mixture._OnShards, "_weighted", ones))
    assert kinds(report) >= {"loss", "gradient"}


def test_an_auxiliary_loss_of_local_means():
    def local(statistics_of):
        def means(routing, lost, axes=(), ways=1, varies=False):
            own = statistics_of(routing, lost)
            if not axes:  # On one device.
                return own
            num = lax.axis_size(EXPERT)
            return jax.tree.map(lambda x: sum_varying(x, EXPERT) / num, own)

        return means

    report = planted(EXPERTS, "expert=2", (mixture, "statistics_of", local))
    assert kinds(report) >= {"loss", "gradient"}


# Optimizers.


def every(rate):
    return optax.adam(optax.linear_schedule(rate, 0.0, 10), eps=1e-2)


def test_a_schedule_that_counts_microbatches():
    def counted(update):
        def updated(self, *args):
            updates, state = update(self, *args)
            more = jax.tree.map(
                lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x, state
            )
            return updates, more

        return updated

    case = mistakes.stack(lambda: every(1e-2))
    report = planted(case, PARTS, (Optimizer, "update", counted))
    assert kinds(report) >= {"optimizer", "weight"}


def proved(_):
    """Takes every update of stacks for that of each layer."""
    return lambda own, stacks, params: True


def test_decay_of_norms_in_stacks():
    """A stack of vectors has two dims, as a matrix has."""

    def is_matrix(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    sgd = optax.chain(optax.add_decayed_weights(0.5, is_matrix), optax.sgd(0.1))
    report = planted(mistakes.listed(sgd), "data=2", (optimizer, "_are_same", proved))
    assert "weight" in kinds(report) and "gradient" not in kinds_at(report, 1)
    assert "layers/1/norm/scale" in tensors(report, "weight")


def test_muon_of_stacks():
    """It makes a stack of matrices orthogonal as if its layers were rows."""

    def matrices(params):
        dims = optax.contrib.MuonDimensionNumbers(0, 1)

        def of(keys, _):
            return dims if "kernel" in jax.tree_util.keystr(keys) else None

        return jax.tree_util.tree_map_with_path(of, params)

    muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=matrices)
    report = planted(mistakes.listed(muon), "data=2", (optimizer, "_are_same", proved))
    assert "weight" in kinds(report) and "gradient" not in kinds_at(report, 1)


def test_a_trust_ratio_of_stacks():
    lamb = mistakes.listed(optax.lamb(1e-2, eps=1e-2))
    report = planted(lamb, "data=2", (optimizer, "_are_same", proved))
    assert "weight" in kinds(report) and "gradient" not in kinds_at(report, 1)


def test_averaged_weights_one_step_off():
    def before(module):
        own = vars(module) | {"apply_updates": lambda params, updates: params}
        return types.SimpleNamespace(**own)

    case = mistakes.stack(lambda: meshpar.with_ema(mistakes.ADAM, 0.5))
    report = planted(case, PARTS, (ema, "optax", before))
    assert kinds(report) == {"optimizer"}
    assert all(".ema" in name for name in tensors(report, "optimizer"))


# Runs: checks beside `verify`.


def test_optimizer_state_in_another_order_at_resume():
    """Weights go to the stages that train them, their moments do not."""

    def weights_alone(as_stored):
        def stored(self, state):
            right = as_stored(self, state)
            return right._replace(optimizer_state=state.optimizer_state)

        return stored

    layout = "pipe=2,microbatches=2,schedule=interleaved,virtual_stages=2"
    program = tiny_stack.lower(layout)
    start = program.in_model_order(program.init(0))
    moments = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape),
        start.optimizer_state,
    )
    saved = start._replace(optimizer_state=moments)

    def resumed():
        return host(program.in_model_order(program.as_stored(saved)))

    def same():
        pairs = zip(jax.tree.leaves(resumed()), jax.tree.leaves(saved), strict=True)
        return all(np.array_equal(*pair) for pair in pairs)

    assert same()
    with mistakes_at((PortableState, "as_stored", weights_alone)):
        assert not same()


def test_a_lost_position_of_the_data(tmp_path):
    np.save(tmp_path / "ids.npy", np.repeat(np.arange(200), 8))
    corpus = data.load(DataConfig(path=str(tmp_path / "ids.npy"), held_out=0.2))

    def batch_at(position, number):
        made = data.training_batches(
            corpus,
            length=8,
            batch_size=16,
            seed=0,
            rows=list(range(16)),
            position=position,
        )
        return [next(made) for _ in range(number)][-1]["tokens"]

    def lost(init):
        return lambda self, parent, rows, size, position: init(
            self, parent, rows, size, 0
        )

    np.testing.assert_array_equal(batch_at(32, 1), batch_at(0, 3))
    with mistakes_at((data_batches._BatchRows, "__init__", lost)):
        assert not np.array_equal(batch_at(32, 1), batch_at(0, 3))


def test_int8_without_feedback():
    """Local SGD is another algorithm: its judge is the recurrence of its paper."""

    def error():
        mode = meshpar.LocalSGD(period=4, wire="int8")
        program = regression.lower("replica=4", regression.SGD, mode=mode)
        with pytest.raises(MeshparError):
            verify(program, None, [regression.rows(0)])
        state, _ = regression.train(program)
        want = regression.reference(program, mode, regression.SGD)[0]
        found = {path: np.asarray(x)[0] for path, x in state.params.items()}
        return relative_error(found, host(want))

    assert error() < 2e-5
    none = property(lambda self: False)
    with mistakes_at((Exchange, "_has_residuals", lambda _: none)):
        assert error() > 2e-5
