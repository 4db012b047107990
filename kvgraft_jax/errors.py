"""Errors with one clear line: what, expected, found, next step.

`exit_code` is what the command line returns: 2 for wrong usage or an
incompatible input, 1 when a check failed or the world did (damage, full disk,
permission, network).
"""


def quoted(value: object, limit: int = 80) -> str:
  """Returns a value as Python writes it, a long text cut with an ellipsis."""
  if isinstance(value, str):
    return repr(shortened(value, limit))
  return shortened(repr(value), limit)


def shortened(text: str, limit: int) -> str:
  """Returns a text, cut with an ellipsis if it is longer than the limit."""
  return text if len(text) <= limit else text[:limit - 3] + '...'


class KvgraftError(Exception):
  """Base of every error that this package raises on purpose."""

  exit_code = 1


class UsageError(KvgraftError):
  """The request cannot be served as asked: a wrong flag, value or reference."""

  exit_code = 2


class NotFoundError(UsageError):
  """No artifact, name, model or file answers the reference."""


class CapacityError(UsageError):
  """More positions were asked for than the model or the memory can hold."""


class IncompatibleError(UsageError):
  """Model, tokenizer, template or artifact format differ from the artifact's.

  Attributes:
    factor: name of the first differing factor, such as 'model'.
  """

  def __init__(self, message: str, factor: str = ''):
    super().__init__(message)
    self.factor = factor


class ClassMismatchError(IncompatibleError):
  """The numerics class here is not the artifact's: bits may differ."""


class MissingDependencyError(UsageError):
  """An optional package is needed for this request and is not installed."""


class DamageError(KvgraftError):
  """Stored bytes are missing or are not the bytes that were deposited."""


class StorageError(KvgraftError):
  """The store could not be read or written: permission, space, network."""


class ConflictError(KvgraftError):
  """Two computations of one key disagree: a non-determinism to report."""


class NumericsError(KvgraftError):
  """A value that must be finite is not, or an invariance did not hold."""


class SandboxError(KvgraftError):
  """A program cannot be run safely here, or the sandbox failed."""


class NotVerifiedError(KvgraftError):
  """An answer did not pass its check, so nothing may be kept of it."""
