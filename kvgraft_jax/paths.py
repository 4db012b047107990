"""Where this package keeps what it can make again."""

import os
import pathlib


def cache_dir() -> pathlib.Path:
  """Returns the user's cache directory; it need not exist yet."""
  own = os.environ.get('KVGRAFT_CACHE_DIR')
  if own:
    return pathlib.Path(own)
  base = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  if base.startswith('~'):  # A user without a home: nowhere can it be made.
    base = os.devnull
  return pathlib.Path(base) / 'kvgraft_jax'
