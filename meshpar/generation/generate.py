"""`Generator`: continues prompts with a model under a layout."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import Params
from meshpar.contracts.host_transfers import host_violations
from meshpar.errors import MeshparError
from meshpar.generation.programs import GenerationPrograms
from meshpar.generation.prompts import checked_prompts, stop_mask
from meshpar.generation.sampling import GREEDY, Sampling, SamplingArrays
from meshpar.generation.state import GenerationState
from meshpar.layouts.layout import Layout
from meshpar.lowering.given_params import place_params, stacked_params
from meshpar.lowering.program import Program

_LOOK_EVERY = 8
"""Tokens between two looks at whether all sequences are complete."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """A model that continues prompts under a layout.

    Attributes:
      program: the model and its weights under the layout.
      programs: prefill and decoding.
      max_length: most tokens of a sequence that the model sees at once.
    """

    program: Program
    programs: GenerationPrograms
    max_length: int

    @property
    def layout(self) -> Layout:
        """The layout of decoding; `generation.layouts` says how it follows."""
        return self.programs.layouts.decode

    @property
    def batch_size(self) -> int:
        """Sequences that are generated at once."""
        return self.programs.batch_size

    def violations(self) -> list[str]:
        """Compares the compiled decoding with its contract; one line per difference.

        There is none for a model that does not declare its collectives.
        """
        contract = self.programs.contract
        if contract is None:
            return []
        decode = self.programs.decode
        return [
            *contract.violations(decode.collectives),
            *host_violations(contract.host, decode.host_transfers),
        ]

    def compile(self) -> None:
        """Compiles prefill and decoding, which their first use would do otherwise."""
        for program in (self.programs.prefill, self.programs.decode):
            _ = program.compiled

    def place(self, params: Any) -> Params:
        """Puts weights onto the devices, cast to the dtype of the computation.

        Args:
          params: every parameter: nested or flat, of numpy or jax, of any layout.

        Raises:
          MeshparError: a parameter is missing, unknown or of another shape.
        """
        like = self.program.abstract_params
        return place_params(stacked_params(self.program.model, like, params), like)

    def prefill(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        stop: Iterable[int] = (),
        sequence_ids: Sequence[int] | None = None,
        dropped: Sequence[int] | None = None,
    ) -> GenerationState:
        """Runs all tokens of prompts but the last, which `decode` runs first.

        Args:
          params: from `place`.
          prompts: at most `batch_size` lists of token ids, of any lengths.
          num_tokens: tokens to generate, for all or for each prompt.
          stop: token ids that complete a sequence.
          sequence_ids: numbers of the sequences, for random numbers; 0, 1, ... by
            default.
          dropped: tokens of each sequence before its prompt, for random numbers.

        Raises:
          MeshparError: too many prompts, or one that the model cannot take.
        """
        limit, num = self.max_length, len(prompts)
        prompts = checked_prompts(prompts, self.programs.vocab, limit)
        if num > self.batch_size:
            raise MeshparError(
                f"{num} prompts, and batch_size={self.batch_size}: give as many at "
                "most, or make the generator with a larger batch_size"
            )
        rows = self.batch_size
        tokens = np.zeros((rows, self.programs.slots), np.int32)
        length = np.array([len(p) for p in prompts] + [1] * (rows - num), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt

        def rows_of(values: Any, default: int, dtype: Any = np.int32) -> np.ndarray:
            values = np.broadcast_to(default if values is None else values, (num,))
            return np.append(values, np.full(rows - num, default)).astype(dtype)

        new = rows_of(num_tokens, 0)
        end = np.minimum(length + new, limit)
        position = length - 1
        if self.programs.cached.rows_advance_together:
            position = np.full_like(position, position[:num].min())
        cache = self._cached(params, tokens, int(position[:num].max()))
        ids = range(num) if sequence_ids is None else sequence_ids
        state = GenerationState(
            cache=cache,
            tokens=tokens,
            position=position,
            length=length,
            limit=end,
            done=new == 0,
            sequence=rows_of(list(ids), 0, np.uint32),
            dropped=rows_of(dropped, 0),
            stops=stop_mask(stop, self.programs.vocab),
        )
        like = jax.tree.map(lambda x: x.sharding, self.programs.abstract_state)
        return jax.tree.map(_placed, state, like)

    def _cached(self, params: Params, tokens: np.ndarray, last: int) -> Params:
        """The cache with the first `last` tokens of every row."""
        programs, cache = self.programs, self.programs.empty_cache()
        placed = _placed(tokens, programs.abstract_state.tokens.sharding)
        for first in range(0, last, programs.block):
            ends = self._whole(np.int32(first)), self._whole(np.int32(last))
            cache = programs.prefill.compiled(params, cache, placed, *ends)
        return cache

    def decode(
        self, params: Params, state: GenerationState, sampling: SamplingArrays
    ) -> tuple[GenerationState, jax.Array]:
        """Runs one token of every sequence and draws the next tokens.

        Args:
          params: from `place`.
          state: donated; do not use it afterwards.
          sampling: from `sampling_arrays`.

        Returns:
          (the next state, float32 logits [B, V] for the drawn tokens).
        """
        return self.programs.decode.compiled(params, state, sampling)

    def sampling_arrays(self, sampling: Sampling) -> SamplingArrays:
        """The settings of sampling as arrays, an argument of `decode`."""
        return jax.tree.map(self._whole, sampling.as_arrays())

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        stop: Iterable[int] = (),
        sequence_ids: Sequence[int] | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Continues prompts.

        A sequence that reaches `max_length` goes on from the last half of its tokens.

        Args:
          params: from `place`.
          prompts: at most `batch_size` lists of token ids, of any lengths
            (`generation.unpadded` reads padded arrays).
          num_tokens: most tokens to generate for each prompt.
          sampling: how tokens are drawn.
          stop: token ids that complete a sequence; they are not returned.
          sequence_ids: as in `prefill`.
          on_token: called after every token.

        Returns:
          The generated token ids of every prompt.

        Raises:
          MeshparError: too many prompts, or one that the model cannot take.
        """
        if num_tokens < 0:
            raise MeshparError(f"num_tokens={num_tokens}: use 0 or more")
        histories = checked_prompts(prompts, self.programs.vocab, self.max_length)
        starts = [len(history) for history in histories]
        left, stop = [num_tokens] * len(histories), list(stop)
        dropped = [0] * len(histories)
        arrays = self.sampling_arrays(sampling)
        while any(left):
            windows = [h[d:] for h, d in zip(histories, dropped, strict=True)]
            state = self.prefill(
                params,
                windows,
                left,
                stop=stop,
                sequence_ids=sequence_ids,
                dropped=dropped,
            )
            state = self._decoded(params, state, windows, left, arrays, on_token)
            tokens, length, limit, done = self._fetched(
                (state.tokens, state.length, state.limit, state.done)
            )
            for row, window in enumerate(windows):
                new = tokens[row, len(window) : length[row]].tolist()
                histories[row] += new
                is_stopped = done[row] and length[row] < limit[row]
                left[row] = 0 if is_stopped else left[row] - len(new)
                if length[row] == self.max_length:
                    dropped[row] += self.max_length - max(1, self.max_length // 2)
        pairs = zip(histories, starts, strict=True)
        return [history[start:] for history, start in pairs]

    def _decoded(
        self,
        params: Params,
        state: GenerationState,
        windows: list[list[int]],
        left: list[int],
        sampling: SamplingArrays,
        on_token: Callable[[], None],
    ) -> GenerationState:
        """Decodes until all sequences are complete, or one of them is full."""
        active = [w for w, num in zip(windows, left, strict=True) if num]
        lengths = [len(window) for window in windows]
        first = max(map(len, active))
        steps = min(max(left), self.max_length - first)
        if self.programs.cached.rows_advance_together:
            # Tokens of longer prompts run one by one behind the end of the shortest.
            last = max(
                min(length + num, self.max_length)
                for length, num in zip(lengths, left, strict=True)
            )
            steps = last - min(lengths)
        for step in range(1, steps + 1):
            state, _ = self.decode(params, state, sampling)
            on_token()
            if step % _LOOK_EVERY == 0 and self._all_done(state.done):
                break
        return state

    def _whole(self, x: Any) -> jax.Array:
        """A number on all devices."""
        mesh = self.programs.mesh
        return _placed(x, NamedSharding(mesh, PartitionSpec()))

    @functools.cached_property
    def _gather(self) -> Callable[[Any], Any]:
        sharding = NamedSharding(self.programs.mesh, PartitionSpec())
        return jax.jit(lambda tree: tree, out_shardings=sharding)

    def _fetched(self, tree: Any) -> Any:
        """Arrays on the host of every process."""
        return jax.tree.map(np.asarray, self._gather(tree))

    def _all_done(self, done: jax.Array) -> bool:
        return bool(self._fetched(done).all())


def _placed(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the host on its devices; one that is there stays as it is."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
