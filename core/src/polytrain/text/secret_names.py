"""Recognises secrets by their names, and addresses that hold some. Pure.

A false positive hides a value from a reader; a false negative publishes a key. So `key` and `token`
count as secrets unless the words beside them are common in machine learning.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

HIDDEN = "…"
"""Shown in place of a secret."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name in snake, kebab, camel or any other case."""

_CERTAIN = re.compile(
    r".*(?:password|passwd|passphrase|passcode|secret|credential"
    r"|(?:api|auth|access|secret|private)(?:key|token))s?"
    r"|pwd|creds|jwt|bearer|cookies?|authorization|webhook"
)
"""Words that mean a secret anywhere in a name."""

_KINDS = _words(
    """
    access account api auth bearer client deploy deployment encryption license master private
    refresh secret security service session signing ssh storage subscription
    """
)
"""Words after which `key` or `token` means a secret anywhere in a name."""

_PLACES = _words(
    """
    column count dir directory env environment expiry field file filename header id ids len
    length lifetime location name path prefix scope size timeout ttl type var variable
    """
)
"""Last words of names whose value describes a secret, but isn't one."""

_LAST = _words("auth dsn key oauth pw sas token")
"""Last words of a secret's name, unless the word before gives another meaning."""

_LAST_TWO = frozenset({("connection", "string"), ("conn", "string"), ("conn", "str")})

_OF_A_DICT = _words(
    """
    action answer att audio axis batch best block bucket by cache caption checkpoint class col
    column config context count data dataset df dict dispatch edge embedding eq example f
    feature file frame graph group h5 hash image index infer input instance item jax join label
    lang language layer layers logits lookup loss map mask max message metric min model module
    monitor n name node num object obs observation order output param parameter partition pixel
    point prediction primary prng prompt prop query question random record registry response
    reward rng row s sample score sequence shard sort split state step stratify sub subconfig
    submodule table tag target task tensor text time train unique update val value video view
    weight x y
    """
)
"""Words before `key` for keys of dicts, tables, attention layers or random generators."""

_OF_TEXT = _words(
    """
    added additional additive audio average avg begin beginning blank bod boi bos break byte
    char class classification cls completion control cur current decoder delay delimiter dist
    distillation dummy each empty encoder end eod eoi eom eos eot eov extra fill filler fim
    first fixed forced frame fuse generated global group ignore image img infer infill input int
    label lang language last latent line mask max mean media memory middle min mod modality
    model motion n new newline next noise null num object oov out output pad padding patch per
    placeholder point pooling position prefix previous prompt query question reasoning register
    sep separator single soft sos sot space spatial speaker special speech start stop sub
    subword suffix summary system tail target task temporal text think tile time timestamp tool
    total trigger unk unknown unused use utterance video vision visual vocab word
    """
)
"""Words before `token` for tokens of texts, pictures or models."""

_WEAK = {"key": _OF_A_DICT, "token": _OF_TEXT}
"""Words whose meaning depends on the word before."""


@cache
def is_secret(name: str) -> bool:
    """Return whether a name denotes a secret, such as `api_key`, `--hf-token` or `dbPassword`.

    Trailing numbers, as in `API_KEY_2`, are ignored.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _PLACES:
        return False
    if any(map(_CERTAIN.fullmatch, words)):
        return True
    if any(kind in _KINDS and what.removesuffix("s") in _WEAK for kind, what in pairwise(words)):
        return True
    before, last = ("", *words)[-2:]
    if (before, last) in _LAST_TWO:
        return True
    return last in _LAST and before not in _WEAK.get(last, ())


ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)

_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>]+")
"""An address in a text. Without a bound, a search in a long word would take quadratic time."""


def holds_credentials(location: str) -> bool:
    """Return whether an address contains a password, which would end up in logs."""
    return without_credentials(location) != location


def without_credentials(location: str, mark: str = "…") -> str:
    """Return the address for display, with `mark` in place of passwords and secrets."""
    found = ADDRESS.match(location)
    if found is None:
        return location
    rest, question, options = found["rest"].partition("?")
    end = _end_of_password(rest)
    shown = "&".join(_without_secret(option, mark) for option in options.split("&"))
    return f"{found['scheme']}://{mark if end else ''}{rest[end:]}{question}{shown}"


def without_credentials_in(text: str) -> str:
    """Return a text for display, with `…` in place of passwords and secrets in its addresses."""
    return _IN_TEXT.sub(lambda found: without_credentials(found[0]), text)


def _without_secret(option: str, mark: str) -> str:
    name, equals, _ = option.partition("=")
    is_signature = name == "sig" or name.lower().endswith("signature")
    return f"{name}={mark}" if equals and (is_signature or is_secret(name)) else option


def _end_of_password(rest: str) -> int:
    """Return the length of the user and password after the scheme; 0 if there are none."""
    authority, _, path = rest.partition("/")
    user, at, _ = authority.rpartition("@")
    if at:
        return len(user) if ":" in user else 0
    # A slash in a password should be written as %2F, but not everybody does.
    _, colon, port = authority.partition(":")
    is_port = port.isdigit() or authority.startswith("[")
    return rest.rindex("@") if colon and not is_port and "@" in path else 0
