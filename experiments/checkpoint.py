r"""Says what lies in a run's folder, and whether a layout could go on from it.

    python -m experiments.checkpoint runs/bytes-llama
    python -m experiments.checkpoint runs/bytes-llama --can_resume="fsdp=4,tensor=2"
    python -m experiments.checkpoint runs/bytes-llama --export=safetensors
    python -m experiments.checkpoint runs/new --import=FOLDER --recipe=gpt2-124m

Weights go to and come from folders of Hugging Face's transformers (GPT-2 and Llama). It
needs no device but the CPU.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import rich.console
import rich.table
from absl import flags

import meshpar
from experiments import building, command_line, data, hugging_face
from experiments.config import Config, ConfigError, from_dict
from meshpar.checkpoint import persistent
from meshpar.checkpoint.checkpoints import Checkpoints, changed_tensor
from meshpar.checkpoint.persistent import StoredCheckpoint
from meshpar.errors import CheckpointError
from meshpar.lowering import replicas

flags.adopt_module_key_flags(command_line)
CAN_RESUME = flags.DEFINE_string(
    "can_resume", None, "A layout: says whether it could go on from here, or why not."
)
EXPORT = flags.DEFINE_enum(
    "export", None, ["safetensors"], "Writes the newest weights for transformers."
)
TO = flags.DEFINE_string("to", None, "Where to; DIR/huggingface by default.")
IMPORT = flags.DEFINE_string(
    "import", None, "Starts a run in DIR with the weights in this folder."
)


def folder_of(path: str) -> pathlib.Path:
    """The folder of checkpoints, given it or the run's.

    Raises:
      CheckpointError: there is none.
    """
    run = pathlib.Path(path)
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not persistent.find_checkpoints(folder):
        raise CheckpointError(f"{path} holds no checkpoint; give the folder of a run")
    return folder


def print_list(found: Sequence[StoredCheckpoint], corrupt: pathlib.Path) -> None:
    """Prints the checkpoints as a table."""
    table = rich.table.Table("step", "layout", "samples used", "bytes", "state")
    for one in found:
        about = one.metadata or {}
        layout, position = about.get("layout", "?"), about.get("position", "?")
        state = one.problem or "complete"
        table.add_row(
            str(one.step), str(layout), str(position), f"{one.num_bytes:,}", state
        )
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print(table)
    if corrupt.is_dir():
        names = ", ".join(sorted(path.name for path in corrupt.iterdir()))
        console.print(f"set aside as corrupt in {corrupt}: {names}", soft_wrap=True)


def why_not(found: StoredCheckpoint, text: str) -> str:
    """Why a layout cannot go on from a checkpoint; "" if it can.

    Args:
      found: the checkpoint, with metadata.
      text: the layout.
    """
    config = from_dict(found.metadata["config"])
    layout = meshpar.layouts.parse(text)
    mode = "local_sgd" if layout.replica > 1 else "synchronous"
    if config.optimizer_mode != mode:
        fresh = type(config.local_sgd)()
        config = dataclasses.replace(config, optimizer_mode=mode, local_sgd=fresh)
    jax.config.update("jax_platforms", "cpu")
    meshpar.simulate(layout.num_devices)
    try:
        program = building.make_program(
            config, layout, jax.devices()[: layout.num_devices]
        )
    except meshpar.MeshparError as error:
        return str(error)
    return persistent.reason_not_restorable(
        found, program.portable_state, layout.replica
    )


def _one_device(config: Config) -> tuple[Config, meshpar.TrainProgram]:
    """The configuration as a synchronous run on one CPU device, lowered."""
    fresh = type(config.local_sgd)()
    config = dataclasses.replace(
        config, optimizer_mode="synchronous", local_sgd=fresh, lowering="", layout=""
    )
    jax.config.update("jax_platforms", "cpu")
    layout = meshpar.layouts.parse("data=1")
    program = building.make_program(config, layout, jax.devices()[:1])
    return config, program


def export(newest: StoredCheckpoint, to: pathlib.Path) -> None:
    """Writes the weights of a checkpoint, the average of its replicas.

    Raises:
      MeshparError: a checkpoint that cannot be read, or a decoder they do not have.
    """
    config, program = _one_device(from_dict(newest.metadata["config"]))
    if config.framework != "nnx":
        raise ConfigError(f"framework={config.framework}: only nnx models have names")
    theirs, wanted = newest.metadata.get(persistent.REPLICAS, 1), program.portable_state
    abstract = replicas.with_replicas(wanted, 1, theirs)
    try:
        state, _ = persistent.read_checkpoint(newest.path.absolute(), abstract, None)
    except Exception as error:
        raise CheckpointError(f"{newest.path} cannot be read: {error}") from error
    if why := changed_tensor(state, None, newest.metadata):
        raise CheckpointError(f"{newest.path} is corrupt: {why}")
    state = replicas.converted(state, theirs, wanted, 1)
    names = hugging_face.write(to, config.model, jax.device_get(state.params))
    print(f"wrote {len(names)} tensors of step {int(state.step)} to {to}")


def import_weights(run: pathlib.Path, source: pathlib.Path) -> None:
    """Starts a run with weights of theirs: a checkpoint of step 0.

    Raises:
      MeshparError: the folder holds a run already, or a model that ours cannot be.
    """
    folder = run / "checkpoints"
    if persistent.find_checkpoints(folder):
        raise CheckpointError(f"{run} holds a run already: import into a new folder")
    theirs, tensors = hugging_face.read(source)
    config = command_line.config_from_flags()
    recipe = config.model
    kept = dict(dropout=recipe.dropout, loss_block=recipe.loss_block)
    if theirs.position == "rope":
        kept["length"] = min(recipe.length, theirs.length)  # No weight depends on it.
    try:
        model = dataclasses.replace(theirs, **kept)
    except ValueError as error:
        raise ConfigError(f"with the recipe's {kept}: {error}") from error
    config = dataclasses.replace(config, model=model, framework="nnx")
    corpus = data.load(config.data)
    config, program = _one_device(building.fit_vocabulary(config, corpus))
    shapes = {path: param.shape for path, param in program.model.params.items()}
    params = hugging_face.imported(config.model, shapes, tensors)
    state = program.init(config.seed)
    on_device = {
        path: jax.device_put(x, state.params[path].sharding)
        for path, x in params.items()
    }
    about = {
        "position": 0,
        "layout": "data=1",
        "config": dataclasses.asdict(config),
        **building.identity(config, corpus),
    }
    checkpoints = Checkpoints(folder, program.portable_state)
    with contextlib.closing(checkpoints):
        checkpoints.save(0, state._replace(params=on_device), about)
    changed_tensor = [
        f"--set model.{field.name}={getattr(model, field.name)}"
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != getattr(recipe, field.name)
    ]
    given = [f"--recipe={config.recipe}", f"--workdir={run}", *changed_tensor]
    print(f"{len(tensors)} tensors are step 0 of a run; go on with the same flags and")
    print("python -m experiments.run", " ".join(given))


def main(arguments: Sequence[str]) -> int:
    """Lists, answers or converts; returns the exit code, 1 for no."""
    if len(arguments) != 2:
        raise CheckpointError("give one folder: python -m experiments.checkpoint DIR")
    wishes = [CAN_RESUME.value, EXPORT.value, IMPORT.value]
    if sum(wish is not None for wish in wishes) > 1:
        raise CheckpointError("give one of --can_resume, --export and --import")
    run = pathlib.Path(arguments[1])
    if IMPORT.value is not None:
        import_weights(run, pathlib.Path(IMPORT.value))
        return 0
    folder = folder_of(arguments[1])
    found = persistent.find_checkpoints(folder)
    if not any(wishes):
        print_list(found, folder.parent / "corrupt")
        return 0
    usable = [one for one in found if not one.problem]
    if not usable:
        raise CheckpointError(f"no checkpoint in {folder} is complete")
    newest = usable[-1]
    if EXPORT.value is not None:
        export(newest, pathlib.Path(TO.value or run / "huggingface"))
        return 0
    if reason := why_not(newest, CAN_RESUME.value):
        print(f"no: {reason}")
        return 1
    print(f"yes: {CAN_RESUME.value} can go on from step {newest.step}")
    return 0


if __name__ == "__main__":
    command_line.run(main, arguments=True)
