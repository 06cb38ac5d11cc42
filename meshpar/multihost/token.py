"""The secret of a run: how its processes prove to each other that they belong to it.

The token itself is never sent. A message carries a proof: an HMAC of its bytes and of
the random challenge that the receiver sent before.
"""

import hmac
import json
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from meshpar.multihost.messages import Message
from meshpar.multihost.process import MultihostError

TOKEN = "MESHPAR_TOKEN"
TOKEN_FILE = "MESHPAR_TOKEN_FILE"

MAX_LINE = 4096
"""Longest message in bytes."""

_SHORTEST = 16


def run_token(environment: Mapping[str, str] = os.environ) -> bytes:
    """The token of this run, from a variable or from the file that one names.

    Raises:
      MultihostError: there is none, or it is too short to be a secret.
    """
    text, source = environment.get(TOKEN, ""), TOKEN
    if not text and (path := environment.get(TOKEN_FILE)):
        source = f"the file {path} of {TOKEN_FILE}"
        try:
            text = pathlib.Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise MultihostError(
                f"cannot read {source}: {error}; write one line of text that only the "
                "processes of the run can read"
            ) from error
    text = text.strip()
    if not text:
        raise MultihostError(
            f"neither {TOKEN} nor {TOKEN_FILE} is set, so any program that reaches the "
            "coordinator's port could join the run; use one of launch/*.sh, which make "
            f"a token, or give all processes the same one: export {TOKEN}=$(openssl "
            "rand -hex 32)"
        )
    if len(text) < _SHORTEST:
        raise MultihostError(
            f"the token in {source} has {len(text)} characters; use at least "
            f"{_SHORTEST}, such as the output of openssl rand -hex 32"
        )
    return text.encode()


def make_challenge() -> str:
    """A random text that no earlier message answers."""
    return secrets.token_hex(16)


def _proof(token: bytes, challenge: str, body: bytes) -> bytes:
    digest = hmac.new(token, challenge.encode() + b"\n" + body, "sha256")
    return digest.hexdigest().encode()


def seal(token: bytes, challenge: str, message: Message) -> bytes:
    """A line that holds a message and the proof that its sender knows the token."""
    body = json.dumps(message.content).encode()
    return _proof(token, challenge, body) + b" " + body + b"\n"


def unseal(token: bytes, challenge: str, line: bytes) -> dict[str, Any] | None:
    """The content of a line, or None.

    None is for a sender who does not know the token, and for a message that is no
    object of JSON or that has a key twice. The proof is checked before anything of the
    message is parsed, in a time that does not depend on where it differs.
    """
    proof, _, body = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(proof, _proof(token, challenge, body)):
        return None
    try:
        content = json.loads(body.decode(), object_pairs_hook=_with_keys_once)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
