"""Writes the logits behind some tokens to an .npz file."""

import os
import tempfile
from typing import Any

from absl import flags as absl_flags
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = '--tokens_file=ids.json --rows=0,5,9 --out=logits.npz'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'tokens_file', None, 'JSON list of token ids, taken verbatim.',
      flag_values=fv)
  absl_flags.DEFINE_string(
      'rows', None, "Indices of tokens, such as 0,5,9, or 'all'; the last"
      ' one by default.', flag_values=fv)
  absl_flags.DEFINE_string(
      'out', None, 'File to write: arrays rows [n] and logits float32 [n, V].',
      flag_values=fv)
  flags.double_bos(fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Computes and writes logits; returns exit code and JSON."""
  flags.require(args, 'tokens_file', 'out')
  path = os.path.realpath(args.out)  # A link stays, a device is not replaced.
  folder = os.path.dirname(path)
  if not os.path.isdir(folder) or (
      os.path.exists(path) and not os.path.isfile(path)):
    raise errors.UsageError(
        f'--out={args.out}: expected a file in an existing directory; make'
        f' {folder} or give another path')
  what = inputs.read_ids('tokens_file', args.tokens_file)
  rows = inputs.parse_rows(args.rows, len(what))
  model = common.load_model(args)
  ids = inputs.to_ids(args, model, what, 0)
  logits = model.context().logits_of(ids, rows)
  _write(path, folder, np.asarray(rows, np.int64), logits)
  common.note(f'{len(rows)} rows of {logits.shape[1]:,} logits: {args.out}')
  return 0, {
      'out': args.out, 'sha256': [hashing.logits_sha256(x) for x in logits],
      'rows': rows, 'tokens': len(ids),
      'argmax': [int(x.argmax()) for x in logits],
  }


def _write(
    path: str, folder: str, rows: np.ndarray, logits: np.ndarray
) -> None:
  """Writes an .npz file that is there whole or not at all."""
  fd, temporary = tempfile.mkstemp(prefix='.kvgraft-', dir=folder)
  try:
    with os.fdopen(fd, 'wb') as f:
      # mkstemp's file is private; the result is as the user's umask wants it.
      mask = os.umask(0)
      os.umask(mask)
      os.fchmod(f.fileno(), 0o666 & ~mask)
      np.savez(f, rows=rows, logits=logits)
    os.replace(temporary, path)
  except BaseException:
    os.unlink(temporary)
    raise


if __name__ == '__main__':
  cli.start('logits')
