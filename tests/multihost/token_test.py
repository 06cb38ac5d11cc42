"""The token of a run: where it comes from, and proofs that answer one challenge."""

import pytest

from meshpar.multihost import MultihostError
from meshpar.multihost import token as tokens
from meshpar.multihost.messages import Hello

TOKEN = "0123456789abcdef0123456789abcdef"


def test_the_token_may_be_in_a_file_and_has_to_be_a_secret(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(MultihostError, match="cannot read the file"):
        tokens.run_token({tokens.TOKEN_FILE: str(path)})
    path.write_text(f"{TOKEN}\n")
    assert tokens.run_token({tokens.TOKEN_FILE: str(path)}) == TOKEN.encode()
    with pytest.raises(MultihostError, match="any program that reaches"):
        tokens.run_token({})
    with pytest.raises(MultihostError, match="has 6 characters"):
        tokens.run_token({tokens.TOKEN: "secret"})


def test_a_proof_answers_one_challenge_and_one_message():
    token = TOKEN.encode()
    hello = Hello(1, 2, "b")
    line = tokens.seal(token, "a", hello)
    assert Hello.of(tokens.unseal(token, "a", line)) == hello
    assert tokens.unseal(token, "b", line) is None
    changed = line.replace(b'"process": 1', b'"process": 3')
    assert changed != line
    assert tokens.unseal(token, "a", changed) is None
    assert tokens.unseal(token, "a", b"\xff" + line) is None
