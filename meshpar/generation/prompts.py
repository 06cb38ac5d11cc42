"""Prompts: lists of token ids of any lengths, from lists or from padded arrays."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from meshpar.errors import MeshparError


def unpadded(tokens_BL: Any, mask_BL: Any) -> list[list[int]]:
    """The prompts in padded arrays, with padding on the left, the right or both sides.

    Args:
      tokens_BL: token ids, integer.
      mask_BL: 1 or True for tokens, 0 for padding.

    Raises:
      MeshparError: arrays of different shapes, or padding between tokens.
    """
    tokens_BL, mask_BL = np.asarray(tokens_BL), np.asarray(mask_BL).astype(bool)
    if tokens_BL.ndim != 2 or tokens_BL.shape != mask_BL.shape:
        raise MeshparError(
            f"tokens {list(tokens_BL.shape)} and mask {list(mask_BL.shape)}: give two "
            "arrays [batch, length]"
        )
    prompts = []
    for row, (tokens_L, mask_L) in enumerate(zip(tokens_BL, mask_BL, strict=True)):
        (places,) = np.nonzero(mask_L)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise MeshparError(
                f"row {row} of the mask has padding between tokens; pad on the left or "
                "on the right"
            )
        prompts.append(tokens_L[mask_L].tolist())
    return prompts


def checked_prompts(
    prompts: Sequence[Sequence[int]], vocab: int, max_length: int
) -> list[list[int]]:
    """The prompts as lists of int.

    Raises:
      MeshparError: no prompt, an empty or a too long one, or an id out of range.
    """
    if not len(prompts):
        raise MeshparError("prompts=[]: give at least one prompt")
    checked = []
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise MeshparError(
                f"prompt {number} is no list of at least one token id; start it with "
                "the token that begins a text"
            )
        if len(ids) >= max_length:
            raise MeshparError(
                f"prompt {number} has {len(ids)} tokens, and max_length={max_length} "
                f"leaves no room for one more; raise max_length, or give its last "
                f"{max_length - 1} tokens"
            )
        if ids.min() < 0 or ids.max() >= vocab:
            raise MeshparError(
                f"prompt {number} holds token ids {ids.min()} to {ids.max()}, and the "
                f"model has 0 to {vocab - 1}; use the tokenizer of the model"
            )
        checked.append(ids.tolist())
    return checked


def stop_mask(stop: Iterable[int], vocab: int) -> np.ndarray:
    """Whether each token id completes a sequence, bool [V].

    Raises:
      MeshparError: an id that the model does not have.
    """
    mask = np.zeros(vocab, bool)
    for token in stop:
        if not 0 <= token < vocab:
            raise MeshparError(
                f"stop={token}: the model has token ids 0 to {vocab - 1}; use one"
            )
        mask[token] = True
    return mask
