"""The secrets of a run: one is drawn, all others are derived from it, and a generator gets only its own.

    run.key         the learner's: signs checkpoints; its store password, its keys of the control plane
      '-> join.key  a generator's: signs frames and messages; its store password, its keys of the plane

Generators on other hosts join with a copy of `join.key`; it does not reveal `run.key`. Entry points read
secrets from files or the environment, never from arguments, which every user sees, and pass them on as keys.
"""

import errno
import hashlib
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.users import GENERATOR, user_of
from asyncrl.config.store import StoreConfig
from asyncrl.control.sockets import GeneratorKeys, LearnerKeys, public_key
from asyncrl.errors import RunError, RunNotUp

# Holds the content of run.key in the learner's processes, and that of join.key in generators.
SECRET_VARIABLE = "ASYNCRL_SECRET"
# Names a file with the same content.
SECRET_FILE_VARIABLE = "ASYNCRL_SECRET_FILE"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, repr=False)
class JoinKeys:
    """The keys of every generator of a run; the learner has them too."""

    secret: bytes
    learner: bytes  # the learner's public key on the control plane

    def text(self) -> str:
        return (self.secret + self.learner).hex()

    @property
    def wire(self) -> bytes:
        """Key of the checksums of frames and messages; others are refused."""
        return _derive(self.secret, "wire")

    @property
    def record(self) -> bytes:
        """Key of the seal of the run's record in the store."""
        return _derive(self.secret, "record")

    @property
    def control(self) -> GeneratorKeys:
        """The keys of the side that calls the control plane."""
        return GeneratorKeys(secret=_derive(self.secret, "control generator"), learner=self.learner)

    def store_password(self, user: str) -> str | None:
        """Return a user's password for the run's own store; None unless it is the generators' user."""
        return _derive(self.secret, "store generator").hex() if user == GENERATOR else None


@dataclass(frozen=True, slots=True, repr=False)
class RunKeys:
    """The keys of the learner."""

    secret: bytes

    @property
    def join(self) -> JoinKeys:
        """The keys of the generators."""
        return JoinKeys(_derive(self.secret, "join"), public_key(self._control_secret))

    @property
    def control(self) -> LearnerKeys:
        """The keys of the side that listens on the control plane."""
        return LearnerKeys(secret=self._control_secret, generators=public_key(self.join.control.secret))

    @property
    def ranks(self) -> tuple[LearnerKeys, GeneratorKeys]:
        """The keys with which the first host of a learner listens, and its other hosts call."""
        lead, host = _derive(self.secret, "rank lead"), _derive(self.secret, "rank host")
        listening = LearnerKeys(secret=lead, generators=public_key(host))
        return listening, GeneratorKeys(secret=host, learner=public_key(lead))

    def store_password(self, user: str) -> str:
        """Return a user's password for the run's own store."""
        return self.join.store_password(user) or _derive(self.secret, f"store {user}").hex()

    @property
    def _control_secret(self) -> bytes:
        return _derive(self.secret, "control learner")


def _derive(secret: bytes, purpose: str) -> bytes:
    return hashlib.blake2b(f"asyncrl {purpose}".encode(), key=secret, digest_size=32).digest()


def parse_keys(text: str) -> RunKeys | JoinKeys:
    """Read the content of run.key or join.key. Raises RunError, which does not repeat it."""
    try:
        values = bytes.fromhex(text.strip())
    except ValueError:
        values = b""
    if len(values) == _KEY_BYTES:
        return RunKeys(values)
    if len(values) == 2 * _KEY_BYTES:
        return JoinKeys(values[:_KEY_BYTES], values[_KEY_BYTES:])
    raise RunError(
        f"the run's secret is {'malformed' if text.strip() else 'not known'}; copy join.key from the "
        f"learner's run directory and name the copy in {SECRET_FILE_VARIABLE}, or set {SECRET_VARIABLE} to "
        "what it holds (128 hexadecimal digits)"
    )


def read_secret(path: Path) -> str:
    """Read a secret from a file. Raises RunError if it is unreadable, or readable by others."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        status = path.stat()
        # Of another user's file our group may be the only reader: so Kubernetes mounts a secret.
        others = 0o077 if status.st_uid == os.geteuid() else 0o007
        if status.st_mode & others:
            raise RunError(
                f"{path} holds a secret that others can read; make another one, or chmod 600 if none has"
            )
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        found = f"{path} holds a secret and cannot be read ({error.strerror})"
        raise RunError(f"{found}; restore it from a copy, or give it back to its owner") from error


def is_given(environment: Mapping[str, str]) -> bool:
    """Whether `environment` names a secret."""
    return bool(environment.get(SECRET_VARIABLE) or environment.get(SECRET_FILE_VARIABLE))


def read_keys(environment: Mapping[str, str]) -> RunKeys | JoinKeys:
    """Read the keys from `environment`, or from a file that it names. Raises RunError."""
    text, file = environment.get(SECRET_VARIABLE, ""), environment.get(SECRET_FILE_VARIABLE, "")
    if file and not text:
        if not Path(file).exists():
            raise RunNotUp(
                f"{SECRET_FILE_VARIABLE} names {file}, which does not exist; the learner writes join.key "
                "when it starts"
            )
        text = read_secret(Path(file))
    return parse_keys(text)


def forget_secrets(environment: MutableMapping[str, str]) -> None:
    """Remove the secrets from `environment`, so that neither engines nor rewards inherit them."""
    environment.pop(SECRET_VARIABLE, None)
    environment.pop(SECRET_FILE_VARIABLE, None)


def run_keys(environment: Mapping[str, str]) -> RunKeys:
    """Return the learner's keys; see `read_keys`. Raises RunError for a join.key."""
    keys = read_keys(environment)
    if not isinstance(keys, RunKeys):
        found = f"{SECRET_VARIABLE} holds a join.key, but the learner needs the run.key"
        raise RunError(f"{found}; start it on the host that has the file")
    return keys


def join_keys(environment: Mapping[str, str]) -> JoinKeys:
    """Return a generator's keys; see `read_keys`. From a run.key it gets only the generators' part."""
    keys = read_keys(environment)
    return keys.join if isinstance(keys, RunKeys) else keys


def store_password(
    store: StoreConfig, url: str, keys: RunKeys | JoinKeys, environment: Mapping[str, str]
) -> str | None:
    """Return the password: from `environment` for a configured store, from `keys` for the run's own."""
    return keys.store_password(user_of(url)) if store.url is None else environment.get(store.password_env)
